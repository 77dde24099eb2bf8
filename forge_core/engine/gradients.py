"""The global norm of the gradient, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup


def global_norm(parameters: Iterable[nn.Parameter], stages: ProcessGroup | None = None) -> Tensor:
    """2-norm of all gradients together, a device scalar in at least float32, the same on every rank.

    Squares are summed over distinct parameters, grouped by the mesh they are sharded on, then over the ranks of
    `stages` (the pipeline's), which hold different parameters. Nothing is waited for.
    """
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter.grad)
    squares = [_norm(gradients).square() for gradients in groups.values()]
    total = torch.stack(squares).sum() if squares else torch.zeros(())
    if stages is not None:
        torch.distributed.all_reduce(total, group=stages)
    return total.sqrt()


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def clip(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients down so that their global norm, which is `norm`, becomes at most `max_norm`; in place.

    A norm that is not finite leaves the gradients as they are: what happens then is the non-finite policy's business.
    """
    factor = (max_norm / norm.clamp(min=max_norm)).nan_to_num(1.0)
    groups: dict[tuple[Any, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            groups.setdefault((local.device, local.dtype), []).append(local)
    for (device, dtype), gradients in groups.items():
        torch._foreach_mul_(gradients, factor.to(device=device, dtype=dtype))
