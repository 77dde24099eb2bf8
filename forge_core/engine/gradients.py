"""The global norm of the gradient, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from forge_core.parallel.mesh import local_part


def global_norm(parameters: Iterable[nn.Parameter], stages: ProcessGroup | None = None) -> Tensor:
    """2-norm of all gradients together, a device scalar in at least float32, the same on every rank.

    Squares are summed over distinct parameters: those of each part over the ranks among which the parameter is split,
    then over the ranks of `stages` (the pipeline's), which hold different parameters. Nothing is waited for.
    """
    split: dict[tuple[ProcessGroup, ...], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            split.setdefault(_groups(parameter.grad), []).append(local_part(parameter.grad))
    total = torch.zeros(())
    for groups, gradients in split.items():
        square = _square(gradients)
        for group in groups:
            torch.distributed.all_reduce(square, group=group)
        total = total.to(square) + square
    if stages is not None:
        torch.distributed.all_reduce(total, group=stages)
    return total.sqrt()


def _groups(gradient: Tensor) -> tuple[ProcessGroup, ...]:
    """The groups of ranks among which a gradient is split."""
    if not isinstance(gradient, DTensor):
        return ()
    placements = enumerate(gradient.placements)
    return tuple(gradient.device_mesh.get_group(dim) for dim, placement in placements if not placement.is_replicate())


def _square(gradients: list[Tensor]) -> Tensor:
    """Sum of squares, in float32 or wider."""
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    norms = torch._foreach_norm(gradients, 2, dtype)
    return torch.stack([norm.to(norms[0].device) for norm in norms]).square().sum()


def clip(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients down so that their global norm, which is `norm`, becomes at most `max_norm`; in place.

    A norm of NaN leaves the gradients as they are, an infinite one makes them 0 or NaN: such a step is for the
    non-finite policy to skip, and with `ignore` it is lost.
    """
    factor = (max_norm / norm.clamp(min=max_norm)).nan_to_num(1.0)
    groups: dict[tuple[Any, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            local = local_part(parameter.grad)
            groups.setdefault((local.device, local.dtype), []).append(local)
    for (device, dtype), gradients in groups.items():
        torch._foreach_mul_(gradients, factor.to(device=device, dtype=dtype))
