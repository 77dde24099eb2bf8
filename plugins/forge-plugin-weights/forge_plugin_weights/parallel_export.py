"""The weights of a run that goes on, written by all of its ranks: each its own part, where it belongs in the files.

Shapes are known on every rank, so the headers of the files are, too, and with them the place of every byte. Nothing is
gathered and no file is written twice. Only a tensor that another order of rows would tear apart is gathered, by itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from forge_core.checkpoint.ranks import Ranks
from forge_core.checkpoint.state import model_tensors
from forge_core.checkpoint.storage import publish
from forge_core.contracts.contexts import TrainContext
from forge_core.contracts.optimizer import HasEvaluationWeights
from forge_core.parallel.mesh import gather_objects, global_rank, local_part
from forge_core.plugins.catalog import Catalog
from forge_plugin_weights.exporting import Target, find_target, tensor_plan, write_extras
from forge_plugin_weights.files import INDEX, Boxes, create, index_json, plan_files, writer_of


@frozen
class OwnTensor:
    """A tensor of which this rank has a part."""

    tensor: Tensor
    offsets: tuple[int, ...]
    """Where the part begins."""

    @property
    def is_first_copy(self) -> bool:
        """Whether no other rank of its mesh, of those with the same part, comes before this one."""
        if not isinstance(self.tensor, DTensor):
            return True
        place = self.tensor.device_mesh.get_coordinate() or ()
        return all(
            number == 0 for number, p in zip(place, self.tensor.placements, strict=True) if isinstance(p, Replicate)
        )

    @classmethod
    def of(cls, tensor: Tensor) -> OwnTensor:
        from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

        [chunk] = _create_chunk_list(tensor)
        return cls(tensor, tuple(chunk.offsets))


def export_training(
    context: TrainContext, folder: Path, dtype: torch.dtype | None, shard_bytes: int, architecture: str
) -> None:
    """Write the weights, as they are evaluated, as a published model. Collective.

    Args:
        context: the run's.
        folder: to make; it must not exist.
        dtype: of the weights; None: as they are trained.
        shard_bytes: of each file at most.
        architecture: `model_type`; empty: the one that fits.

    Raises:
        CheckpointError: some rank could not write; nothing is left.
    """
    catalog, ranks = Catalog.installed(), Ranks()
    own = evaluated_tensors(context)
    shapes, dtypes = _of_all_ranks(own, dtype)
    target = find_target(context.job, shapes, catalog, architecture)
    unfinished = folder.with_name(f"{folder.name}.tmp")
    files = plan_files(unfinished, tensor_plan(target.match, dtypes), shard_bytes)

    def begin() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        create(unfinished, files)

    def finish() -> None:
        (unfinished / INDEX).write_text(index_json(files))
        write_extras(unfinished, target, context.job, dtypes, context.folder)
        publish(unfinished, folder)

    try:
        ranks.on_rank0(begin)
        writer = writer_of(files)
        first = _first_holders(own)
        if global_rank() == 0:
            for filler in target.match.fillers:
                writer.fill(filler)
        for name in target.match.parts:  # in one order on all ranks: gathering is collective
            if name in own:
                _write(own[name], target, name, writer, first[name] == global_rank())
        ranks.on_all(writer.close)
        ranks.on_rank0(finish)
    except BaseException:
        if global_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def evaluated_tensors(context: TrainContext) -> dict[str, Tensor]:
    """Returns parameters and persistent buffers by name, as they are evaluated; a pipeline rank has some of them."""
    optimizer = context.optimizer
    tensors = model_tensors(context.model)
    if not isinstance(optimizer, HasEvaluationWeights):
        return tensors
    averages = optimizer.evaluation_weights()
    groups = optimizer.param_groups
    named = {name: p for group in groups for name, p in zip(group["names"], group["params"], strict=True)}
    return tensors | {name: averages[p] for name, p in named.items() if p in averages and name in tensors}


def _of_all_ranks(
    own: Mapping[str, Tensor], dtype: torch.dtype | None
) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
    """Shapes and dtypes of the whole model's tensors, of which a pipeline rank has some."""
    held = gather_objects({name: (tuple(tensor.shape), dtype or tensor.dtype) for name, tensor in own.items()})
    every: dict[str, Any] = {name: entry for of_rank in held for name, entry in of_rank.items()}
    return {name: shape for name, (shape, _) in every.items()}, {name: kind for name, (_, kind) in every.items()}


def _first_holders(own: Mapping[str, Tensor]) -> dict[str, int]:
    """The first rank that has a plain tensor, by name; those of a mesh say themselves who is first."""
    held = gather_objects([name for name, tensor in own.items() if not isinstance(tensor, DTensor)])
    first: dict[str, int] = {}
    for rank, names in enumerate(held):
        for name in names:
            first.setdefault(name, rank)
    return {name: first.get(name, global_rank()) for name in own}


@torch.no_grad()
def _write(tensor: Tensor, target: Target, name: str, writer: Boxes, first: bool) -> None:
    for piece in target.match.parts[name]:
        if not piece.written:
            continue
        if not piece.in_rows and isinstance(tensor, DTensor):
            first = not any(tensor.device_mesh.get_coordinate() or ())
            tensor = tensor.full_tensor()  # collective: its ranks all come here
        part = OwnTensor.of(tensor)
        if first and part.is_first_copy:
            writer.write(piece, local_part(tensor).detach().cpu(), part.offsets)
