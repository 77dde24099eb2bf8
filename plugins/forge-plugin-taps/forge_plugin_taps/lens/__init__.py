"""Commands `inside lens`, `inside attention` and `inside patch`, and their functions for Python."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_plugin_taps.lens.activations import Reading, attention_weights, read_points
    from forge_plugin_taps.lens.head_maps import AttentionMaps, attention_maps
    from forge_plugin_taps.lens.layer_predictions import LogitLens, logit_lens
    from forge_plugin_taps.lens.patching import PatchingEffects, patching_effects

_MODULES = {
    "AttentionMaps": "head_maps",
    "LogitLens": "layer_predictions",
    "PatchingEffects": "patching",
    "Reading": "activations",
    "attention_maps": "head_maps",
    "attention_weights": "activations",
    "logit_lens": "layer_predictions",
    "patching_effects": "patching",
    "read_points": "activations",
}

__all__ = [
    "AttentionMaps",
    "LogitLens",
    "PatchingEffects",
    "Reading",
    "attention_maps",
    "attention_weights",
    "logit_lens",
    "patching_effects",
    "read_points",
]


def __getattr__(name: str) -> Any:
    """These import torch, which a command's help does not need."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
