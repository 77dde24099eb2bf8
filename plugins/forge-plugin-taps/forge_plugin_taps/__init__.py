"""Activations: stage `taps`, kinds `sink` and `edit`, and commands that look inside a model."""

from typing import TYPE_CHECKING, Any

from forge_plugin_taps.ablate import Ablate
from forge_plugin_taps.division import shares_tokens
from forge_plugin_taps.edits import Add, Mean, Replace, SelectingEdit, Zero
from forge_plugin_taps.kinds import GRADIENT, Edit, EditComponent, PointInfo, Sink, SinkComponent, TapsInfo
from forge_plugin_taps.probe import Probe
from forge_plugin_taps.statistics import Statistics
from forge_plugin_taps.store import Store
from forge_plugin_taps.store_reader import manifest_of, points_in, read_point, read_tokens, steps_of, steps_with
from forge_plugin_taps.taps import Taps

if TYPE_CHECKING:
    from forge_plugin_taps.capture import TOKENS
    from forge_plugin_taps.owners import Owners
    from forge_plugin_taps.recorder import Recorder, recorder_of
    from forge_plugin_taps.samples import LocalPart, Sample
    from forge_plugin_taps.where import Split, Where

__all__ = [
    "GRADIENT",
    "TOKENS",
    "Ablate",
    "Add",
    "Edit",
    "EditComponent",
    "LocalPart",
    "Mean",
    "Owners",
    "PointInfo",
    "Probe",
    "Recorder",
    "Replace",
    "Sample",
    "SelectingEdit",
    "Sink",
    "SinkComponent",
    "Split",
    "Statistics",
    "Store",
    "Taps",
    "TapsInfo",
    "Where",
    "Zero",
    "manifest_of",
    "points_in",
    "read_point",
    "read_tokens",
    "recorder_of",
    "shares_tokens",
    "steps_of",
    "steps_with",
]

_WITH_TORCH = {
    "Owners": "owners",
    "Recorder": "recorder",
    "recorder_of": "recorder",
    "LocalPart": "samples",
    "Sample": "samples",
    "TOKENS": "capture",
    "Split": "where",
    "Where": "where",
}


def __getattr__(name: str) -> Any:
    """Names whose modules import torch, which a job that is checked does not."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
