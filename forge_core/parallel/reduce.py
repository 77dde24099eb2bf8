"""Sums of gradients over ranks, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from forge_core.parallel.mesh import local_part

BUCKET = 25 * 2**20
"""Elements a reduction takes at most: large enough for bandwidth, small enough to bound the copy."""


def sum_gradients(parameters: Iterable[nn.Parameter], reduce: Callable[[Tensor], object]) -> None:
    """Sum, in place, the gradients of parameters that train; of sharded ones, this rank's part.

    A gradient that is None on this rank counts as zero: another rank may have one, and every rank must take part in
    the same collectives.

    Args:
        parameters: the same ones in the same order on every rank of the reduction.
        reduce: sums a flat tensor over ranks, in place; called with many gradients at a time.
    """
    for bucket in _buckets([parameter for parameter in parameters if parameter.requires_grad]):
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        gradients = [local_part(parameter.grad) for parameter in bucket]
        # bfloat16 gradients are summed in float32: the sum over ranks must not depend on how many there are.
        dtype = torch.promote_types(bucket[0].dtype, torch.float32)
        flat = torch.cat([gradient.reshape(-1).to(dtype) for gradient in gradients])
        reduce(flat)
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = []
    size, dtype = BUCKET, None
    for parameter in parameters:
        if size + parameter.numel() > BUCKET or parameter.dtype != dtype:
            buckets.append([])
            size, dtype = 0, parameter.dtype
        buckets[-1].append(parameter)
        size += parameter.numel()
    return buckets
