"""Exports of models with adapters: the adapters alone, or added to the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs
import torch
from attrs import frozen

from forge_core.checkpoint.ranks import Ranks
from forge_core.checkpoint.state import MODEL, model_tensors
from forge_core.checkpoint.storage import write_manifest
from forge_core.checkpoint.tensors import TensorWriter
from forge_core.config.load import dump_job
from forge_core.contracts.errors import JobError
from forge_kit.nn.adapters import adapter_names, merge_adapters
from forge_kit.tools.trained_model import load_model
from forge_plugin_weights.matching import listed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from forge_core.plugins.catalog import Catalog
    from forge_plugin_weights.exporting import Weights
    from forge_plugin_weights.matching import Match

MERGING = "merging.json"
"""File of an export's record, with a `Merging`."""
Published = Mapping[str, Sequence[tuple[str, int | None]]]
"""By the name of a module in Forge, those of the published modules with its matrix, each with its expert in a stack."""
PEFT = ("adapter_config.json", "adapter_model.safetensors")
"""Files of an adapter in the format of Hugging Face's `peft`."""


@runtime_checkable
class AddsAdapters(Protocol):
    """A plugin that adds adapters to a model, and publishes them in the format of `peft`."""

    def published(self, model: nn.Module, names: Published) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the content of `adapter_config.json`, and the tensors of `adapter_model.safetensors`.

        Args:
            model: with the adapters.
            names: published modules of each matrix that is one there, too.

        Raises:
            JobError: the format has no place for something that was trained.
        """
        ...


@frozen
class Merging:
    """What adding adapters to weights of a dtype has rounded."""

    matrices: int
    lost: float
    """Largest share of an adapter's update that was lost: the norm of the rounding over that of the update."""
    name: str
    """Of the matrix with that."""


def has_adapters(weights: Weights) -> bool:
    """Whether a checkpoint was trained with a plugin that adds adapters."""
    return any(isinstance(plugin, AddsAdapters) for plugin in weights.job.plugins.values())


def merge(weights: Weights, catalog: Catalog, stack: ExitStack, beside: Path) -> tuple[Weights, Merging]:
    """Add the adapters of a checkpoint to its weights, in memory, and write them as a checkpoint without adapters.

    Args:
        weights: of the checkpoint; merged ones have their dtypes.
        catalog: where the model's components are looked up.
        stack: removes the checkpoint when it closes.
        beside: the path in whose folder it is made.
    """
    model = load_model(weights.checkpoint, run=weights.run, device="cpu", catalog=catalog).model
    left_out, merged = set(adapter_names(model)), merge_adapters(model)
    tensors: dict[str, Tensor] = {}
    worst = Merging(len(merged), 0.0, "")
    for name, tensor in model_tensors(model).items():
        if name in left_out:
            continue
        rounded = merged.get(name, tensor).to(weights.dtypes[name])
        tensors[MODEL + name] = rounded
        if name in merged:
            update = torch.linalg.vector_norm(merged[name] - tensor.to(merged[name].dtype))
            lost = float(torch.linalg.vector_norm(rounded.to(update.dtype) - merged[name]) / update.clamp(min=1e-30))
            worst = max(worst, Merging(len(merged), lost, name), key=lambda one: one.lost)
    folder = Path(stack.enter_context(TemporaryDirectory(prefix=".merging-", dir=beside.parent)))
    files = TensorWriter().write(folder, tensors, None, Ranks())
    plain = {name: plugin for name, plugin in weights.job.plugins.items() if not isinstance(plugin, AddsAdapters)}
    job = attrs.evolve(weights.job, plugins=plain)
    kept = {name: value for name, value in weights.manifest.items() if name != "base"}
    manifest = {**kept, "job": dump_job(job, catalog), "files": files}
    write_manifest(folder, manifest)
    own = {name.removeprefix(MODEL): name for name in tensors}
    return (
        attrs.evolve(
            weights,
            checkpoint=folder,
            manifest=manifest,
            job=job,
            names=own,
            shapes={name: weights.shapes[name] for name in own},
            dtypes={name: weights.dtypes[name] for name in own},
        ),
        worst,
    )


def write_adapters(folder: Path, weights: Weights, model: nn.Module, match: Match) -> None:
    """Write the adapters of a checkpoint in the format of `peft`.

    Args:
        folder: is there.
        weights: of the checkpoint.
        model: with its weights.
        match: of the published model's tensors with the weights but for adapters.

    Raises:
        JobError: the format has no place for something that was trained.
    """
    from safetensors.torch import save_file

    plugin = next(plugin for plugin in weights.job.plugins.values() if isinstance(plugin, AddsAdapters))
    config, tensors = plugin.published(model, published_modules(match))
    config["base_model_name_or_path"] = weights.origin.get("folder", "")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if others := sorted(trained - set(adapter_names(model))):
        raise JobError(f"{listed(others)} were trained beside the adapters, which files of adapters lack; take --merge")
    (folder / PEFT[0]).write_text(json.dumps(config, indent=2) + "\n")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / PEFT[1], {"format": "pt"})


def published_modules(match: Match) -> Published:
    """Returns the published modules that have a matrix of Forge's, whole and in its order, by its module."""
    modules: dict[str, list[tuple[str, int | None]]] = {}
    for name, parts in match.parts.items():
        stem, _, own = name.rpartition(".")
        kept = [part for part in parts if not part.copy and part.theirs.endswith(".weight")]
        shape = match.shapes[name]
        # Without offsets a part is in another order, such as a matrix by columns
        if own != "weight" or not kept or any(part.torn or part.row or part.offsets is None for part in kept):
            continue
        stems = [part.theirs.removesuffix(".weight") for part in kept]
        if len(shape) == 2 and len(kept) == 1 and kept[0].shape == kept[0].sizes == shape:
            modules[stem] = [(stems[0], None)]
        elif len(shape) == 3 and all(part.shape == tuple(part.sizes[-2:]) == shape[1:] for part in kept):
            numbers = (part.offsets[0] for part in kept if part.offsets)
            modules[stem] = list(zip(stems, numbers, strict=True))
    return modules
