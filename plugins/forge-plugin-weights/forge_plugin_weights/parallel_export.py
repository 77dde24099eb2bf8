"""The weights of a run in progress, written by all of its ranks: each writes its own part to its place in the files.

Shapes are known on every rank, so the headers of the files are, too, and with them the place of every byte. Nothing is
gathered and no file is written twice. Only a tensor that another order of rows would tear apart is, slice by slice.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from forge_core.checkpoint.ranks import Ranks
from forge_core.checkpoint.run_diff import collect_provenance
from forge_core.checkpoint.run_folder import JOB
from forge_core.checkpoint.run_folder import PROVENANCE as PROVENANCE_FILE
from forge_core.checkpoint.state import model_tensors
from forge_core.checkpoint.storage import publish
from forge_core.config.load import dump_job
from forge_core.contracts.contexts import TrainContext
from forge_core.contracts.optimizer import HasEvaluationWeights
from forge_core.parallel.mesh import gather_objects, global_rank, local_part
from forge_core.plugins.catalog import Catalog
from forge_kit.torch_internals import part_offsets
from forge_plugin_weights.card import write_card
from forge_plugin_weights.exporting import (
    PROVENANCE,
    Target,
    common_dtype,
    dtype_name,
    find_target,
    origin_of,
    tensor_plan,
    write_extras,
)
from forge_plugin_weights.files import INDEX, create, index_json, places_in, plan_files, writer_of
from forge_plugin_weights.importing import ORIGIN
from forge_plugin_weights.kinds import Part, Shapes
from forge_plugin_weights.parity import ReadBack, merged, write_parity

T = TypeVar("T")
Use = Callable[[Part, Tensor, Sequence[int]], None]
GATHERED = 1 << 22
"""Bytes of a slice that is gathered."""


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
        """Returns the tensor with the place of this rank's part; a plain tensor begins at 0."""
        return cls(tensor, part_offsets(tensor))


def export_training(
    context: TrainContext, folder: Path, dtype: torch.dtype | None, shard_bytes: int, architecture: str, *, verify: bool
) -> None:
    """Write the weights, as they are evaluated, as a published model. Collective.

    Args:
        context: the run's.
        folder: to make; it must not exist.
        dtype: of the weights; None: as they are trained.
        shard_bytes: of each file at most.
        architecture: `model_type`; empty: the one that fits.
        verify: whether each rank reads back what it wrote, and compares it with its weights.

    Raises:
        CheckpointError: some rank could not write, or did not find what it wrote; nothing is left.
    """
    catalog, ranks = Catalog.installed(), Ranks()
    own = evaluated_tensors(context)
    shapes, dtypes = _of_all_ranks(own, dtype)
    target = find_target(context.job, shapes, catalog, architecture)
    unfinished = folder.with_name(f"{folder.name}.tmp")
    files = plan_files(unfinished, tensor_plan(target.match, dtypes), shard_bytes)

    def begin() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
        unfinished.mkdir(parents=True)
        create(unfinished, files)  # at their final size, before any rank writes

    def finish() -> None:
        (unfinished / INDEX).write_text(index_json(files))
        write_extras(unfinished, target, context.job, dtypes, context.folder)
        _write_records(unfinished, context, catalog, target, shapes, dtypes)

    first = _first_holders(own)

    def hand_over(use: Use) -> None:
        for name in target.match.parts:  # in one order on all ranks: gathering is collective
            if name in own:
                _hand_over(own[name], target, name, use, first[name] == global_rank())

    try:
        ranks.on_rank0(begin)
        writer = writer_of(files)
        if global_rank() == 0:  # no rank has a part of fillers
            for filler in target.match.fillers:
                writer.fill(filler)
        # All ranks have synced their parts before rank 0 finishes, and before any rank reads.
        _use_parts(ranks, hand_over, writer.write, writer.close)
        ranks.on_rank0(finish)
        if verify:
            # By the headers on the disk and not by the plan, so that these are verified, too
            back = ReadBack(places_in(unfinished))
            results = _use_parts(ranks, hand_over, back.compare, back.close)
            ranks.on_rank0(lambda: write_parity(unfinished / PROVENANCE, merged(results), target.match.parts))
        ranks.on_rank0(lambda: publish(unfinished, folder))
    except BaseException:  # Ctrl-C, too
        if global_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _write_records(
    folder: Path,
    context: TrainContext,
    catalog: Catalog,
    target: Target,
    shapes: Shapes,
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Write the card and the job, with as much of a checkpoint's information as is available during a run."""
    origin = origin_of(context.folder)
    write_card(
        folder,
        context.job,
        catalog,
        architecture=target.architecture.name,
        shapes=shapes,
        dtype=dtype_name(common_dtype(dtypes)),
        step=context.step,
        tokens=None,
        evaluation={},
        origin=origin,
    )
    own = folder / PROVENANCE
    own.mkdir()
    (own / JOB).write_text(dump_job(context.job, catalog))
    record = {"step": context.step, "provenance": collect_provenance(context.job, catalog)}
    (own / PROVENANCE_FILE).write_text(json.dumps(record, indent=1) + "\n")
    if origin:
        (own / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n")


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
    """The first rank that has a plain tensor, by name; for a tensor of a mesh, its mesh determines the first rank."""
    held = gather_objects([name for name, tensor in own.items() if not isinstance(tensor, DTensor)])
    first: dict[str, int] = {}
    for rank, names in enumerate(held):
        for name in names:
            first.setdefault(name, rank)
    return {name: first.get(name, global_rank()) for name in own}


def _use_parts(ranks: Ranks, hand_over: Callable[[Use], None], use: Use, end: Callable[[], T]) -> list[T]:
    """Call `use` for every part, then `end`, on every rank; all raise together what failed on some. Collective."""
    faults: list[Exception] = []

    def unless_failed(part: Part, values: Tensor, offsets: Sequence[int]) -> None:
        # A full disk of one rank waits: raised here, it would leave the others alone in a collective
        if not faults:
            try:
                use(part, values, offsets)
            except Exception as error:
                faults.append(error)

    def ended() -> T:
        if faults:
            raise faults[0]
        return end()

    hand_over(unless_failed)
    return ranks.on_all(ended)


@torch.no_grad()
def _hand_over(tensor: Tensor, target: Target, name: str, use: Use, first: bool) -> None:
    pieces = [piece for piece in target.match.parts[name] if piece.written]
    spread = [piece for piece in pieces if not piece.in_rows] if isinstance(tensor, DTensor) else []
    own = [piece for piece in pieces if piece.in_rows] if isinstance(tensor, DTensor) else pieces
    # This rank's rows are spread over theirs: slices are gathered whole, once for all pieces, and the mesh's first rank
    # writes them.
    if spread and isinstance(tensor, DTensor):
        is_first_of_mesh = not any(tensor.device_mesh.get_coordinate() or ())
        for whole, offsets in _gathered(tensor):
            values = whole.cpu() if is_first_of_mesh else whole
            for piece in spread if is_first_of_mesh else ():
                use(piece, values, offsets)
    part = OwnTensor.of(tensor)
    # Replicas hold the same numbers, of which one is written.
    if own and first and part.is_first_copy:
        values = local_part(tensor).detach().cpu()
        for piece in own:
            use(piece, values, part.offsets)


def _gathered(tensor: DTensor) -> Iterator[tuple[Tensor, Sequence[int]]]:
    """Yields slices of a tensor, whole, and where each begins. Collective: the tensor's ranks all come here."""
    shared = {p.dim % tensor.ndim for p in tensor.placements if hasattr(p, "dim")}
    # Along a dimension that no rank has a part of, a slice of the whole is a slice of each part.
    free = [dimension for dimension in range(tensor.ndim) if dimension not in shared]
    along = max(free, key=lambda dimension: tensor.shape[dimension], default=0)
    line = tensor.numel() // max(1, tensor.shape[along]) * tensor.itemsize
    count = max(1, GATHERED // max(1, line)) if free else tensor.shape[along]  # else whole, as every dimension is split
    for start in range(0, tensor.shape[along], count):
        part: Any = tensor.narrow(along, start, min(count, tensor.shape[along] - start))
        yield part.full_tensor(), [start if dimension == along else 0 for dimension in range(tensor.ndim)]
