"""Adapters in the format of Hugging Face's `peft`: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from forge_core.contracts.errors import JobError, listed
from forge_plugin_lora.low_rank import MAGNITUDE, A, B, Decomposed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from forge_plugin_lora.lora import LoRA

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
SUFFIXES = {
    f".{A}.weight": ".lora_A.weight",
    f".{B}.weight": ".lora_B.weight",
    f".{MAGNITUDE}.weight": ".lora_magnitude_vector",
}
Published = Mapping[str, Sequence[tuple[str, int | None]]]
"""See `forge_plugin_weights.adapters.Published`."""


class Place(NamedTuple):
    """Where a parameter of an adapter, or an expert's part of it, is in `peft`'s file."""

    ours: str
    theirs: str
    expert: int | None


def places(parameters: Iterable[str], names: Published) -> Iterator[Place]:
    """Yields the places of adapters' parameters; the tensors of an expert are those of a separate module there.

    Raises:
        JobError: the published model has a matrix only as a part of a larger tensor.
    """
    lacking = []
    for ours in parameters:
        stem, suffix = next(((ours.removesuffix(own), own) for own in SUFFIXES if ours.endswith(own)), ("", ""))
        if suffix and stem not in names:
            lacking.append(stem)
        for module, expert in names.get(stem, ()) if suffix else ():
            yield Place(ours, f"{PREFIX}{module}{SUFFIXES[suffix]}", expert)
    if lacking:
        where = "in the published model their matrices are no modules, but parts of larger tensors"
        raise JobError(f"peft's format has no place for the adapters of {listed([*dict.fromkeys(lacking)])}: {where}")


def settings(plugin: LoRA) -> dict[str, Any]:
    """Returns the keys of `adapter_config.json` that say what adapters compute."""
    return {
        "peft_type": "LORA",
        "r": plugin.rank,
        "lora_alpha": plugin.alpha,
        "use_rslora": plugin.method == "rslora",
        "use_dora": plugin.method == "dora",
    }


def published(plugin: LoRA, model: nn.Module, names: Published) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """See `forge_plugin_weights.adapters.AddsAdapters.published`."""
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = list(places(own, names))
    tensors = {}
    for ours, theirs, expert in found:
        tensor = own[ours] + lengths(model, ours) if MAGNITUDE in ours else own[ours]
        tensors[theirs] = tensor if expert is None else tensor[expert]
    # Whole names: the end of one may be that of a module without an adapter
    targets = {theirs.removeprefix(PREFIX).rpartition(".lora_")[0] for _, theirs, _ in found}
    config = {
        **settings(plugin),
        "task_type": "CAUSAL_LM",
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(targets),
    }
    return config, tensors


def lengths(model: nn.Module, magnitude: str) -> Tensor:
    """Returns the norms of the rows of W, to which the parameter of this name is added; `peft` has the sums."""
    module = model.get_submodule(magnitude.partition(f".{MAGNITUDE}")[0])
    assert isinstance(module, Decomposed)
    return module.row_norms()
