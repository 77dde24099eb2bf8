"""The part of each weight that a rank has, and whether the parts of all ranks are the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, frozen
from torch.distributed.tensor import DTensor

from forge_core.checkpoint.state import model_tensors
from forge_core.contracts.components import TrainingHook
from forge_core.parallel.mesh import global_rank

if TYPE_CHECKING:
    from forge_core.contracts.contexts import TrainContext
    from forge_core.contracts.model import Model


@frozen
class Part:
    """A rank's part of a tensor."""

    local: torch.Tensor
    dim: int | None
    """The dimension that ranks share; None: each has the whole."""


def parts_of(model: Model) -> dict[str, Part]:
    """Returns the parts of parameters and buffers that this rank has, by name; a pipeline rank has some of them."""
    return {name: _part(tensor.detach()) for name, tensor in model_tensors(model).items()}


def _part(tensor: torch.Tensor) -> Part:
    if not isinstance(tensor, DTensor):
        return Part(tensor.clone(), None)
    shared = [p for p, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True) if size > 1]
    dims = [placement.dim % tensor.ndim for placement in shared if hasattr(placement, "dim")]
    assert len(dims) < 2, "two ranks share a tensor along one dimension"
    return Part(tensor.to_local().clone(), *(dims or [None]))


def check_parts(ranks: Sequence[Mapping[str, Part]], expected: Mapping[str, torch.Tensor]) -> None:
    """Check that the parts of all ranks are together, to the bit, the tensors of one process, and none has most.

    Parts are concatenated here, by none of the code that divided them.
    """
    assert {name for parts in ranks for name in parts} == expected.keys()
    for name, tensor in expected.items():
        parts = [of_rank[name] for of_rank in ranks if name in of_rank]
        divided = [part.local for part in parts if part.dim is not None]
        wholes = [part.local for part in parts if part.dim is None]
        if divided:
            assert len(divided) == len(ranks), f"{name} is divided on some ranks only"
            wholes.append(torch.cat(divided, parts[0].dim))
        for whole in wholes:
            assert torch.equal(whole.to(tensor.dtype), tensor), f"{name} is not that of one process"
    total = sum(tensor.numel() for tensor in expected.values())
    counts = [sum(part.local.numel() for part in parts.values()) for parts in ranks]
    assert all(0 < count < 0.9 * total for count in counts) or counts == [total], f"{counts} of {total}"


@define(kw_only=True, slots=False)
class Arrival(TrainingHook):
    """Writes the parts that this rank has before the first step."""

    def on_train_begin(self, context: TrainContext) -> None:
        model: Any = context.model
        assert context.folder is not None
        torch.save(parts_of(model), context.folder / f"arrived-{global_rank()}.pt")


def arrived(folder: Path) -> list[dict[str, Part]]:
    """The parts of each rank of a run before its first step."""
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob("arrived-*.pt"))]
