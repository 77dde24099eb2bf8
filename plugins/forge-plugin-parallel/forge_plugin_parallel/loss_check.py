"""Finds models in a loss that the ranks of a pipeline share, of which the last alone runs the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import attrs
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from forge_core.contracts.errors import JobError, Problem

DEPTH = 4
"""Objects inside of one another that are searched: a model in a dataclass in a list of a loss, for instance."""


def check_loss(loss: Any, pipeline: dist.ProcessGroup) -> None:
    """Refuse a loss whose model would wait for ranks that never run it.

    Args:
        loss: the built loss.
        pipeline: the ranks that have the stages of this rank's pipeline.

    Raises:
        JobError: it holds a model whose parameters are divided among these.
    """
    stages = set(dist.get_process_group_ranks(pipeline))
    for module in _modules(loss, DEPTH):
        for name, parameter in module.named_parameters():
            shared = stages & _ranks_of(parameter)
            if len(shared) > 1:
                message = (
                    f"holds a model ({type(module).__name__}) whose {name} is divided among the ranks "
                    f"{', '.join(map(str, sorted(shared)))} of one pipeline, of which the last alone computes the "
                    "loss; load it whole on each rank, or leave out parallel.pp"
                )
                raise JobError([Problem("loss", message)])


def _ranks_of(parameter: Any) -> set[int]:
    return set(parameter.device_mesh.mesh.flatten().tolist()) if isinstance(parameter, DTensor) else set()


def _modules(value: Any, depth: int) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    if depth:
        for part in _parts(value):
            yield from _modules(part, depth - 1)


def _parts(value: Any) -> Iterator[Any]:
    """Yields what an object, a function or a container refers to by itself."""
    if isinstance(value, FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if _is_set(cell))
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    # Not into classes and modules, from which everything in the process can be reached
    elif not isinstance(value, type | ModuleType):
        yield from getattr(value, "__dict__", {}).values()
        yield from (getattr(value, f.name, None) for f in attrs.fields(type(value))) if attrs.has(type(value)) else ()


def _is_set(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that was not assigned yet
        return False
