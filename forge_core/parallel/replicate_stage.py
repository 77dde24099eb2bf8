"""What the component `replicate` builds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from forge_core.parallel.mesh import all_reduce_tokens, local_part

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Model

BUCKET = 25 * 2**20
"""Elements a reduction takes at most: large enough for bandwidth, small enough to bound the copy."""


class ReplicateStage:
    """Leaves the model as it is, and sums its gradients once all micro-batches of a step are done."""

    def __init__(self, context: BuildContext) -> None:
        self._mesh = context.mesh
        self._alone = context.layout.token_ranks == 1

    def apply(self, model: Model) -> Model:
        return model

    def complete_gradients(self, model: Model) -> None:
        """Sum every gradient over the token dimensions. A parameter that got none on this rank counts as zero."""
        if self._alone:
            return
        sum_gradients(model.parameters(), lambda flat: all_reduce_tokens(flat, self._mesh))


def sum_gradients(parameters: Iterable[nn.Parameter], reduce: Callable[[Tensor], object]) -> None:
    """Sum, in place, the gradients of parameters that train; of split ones, this rank's part. None counts as zero.

    Args:
        reduce: sums a flat tensor over ranks, in place; called with many gradients at a time.
    """
    for bucket in _buckets([parameter for parameter in parameters if parameter.requires_grad]):
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        gradients = [local_part(parameter.grad) for parameter in bucket]
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
