"""Whole rows from the parts of ranks that divide sequences, for losses that compare or score whole answers.

Shapes: B rows, S positions, s positions of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from attrs import field, frozen
from torch import Tensor

from forge_core.contracts.errors import ForgeError
from forge_kit.nn.batches import PLACES

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch


def shared_groups(context: BuildContext) -> list[dist.ProcessGroup]:
    """Returns the groups of ranks that hold different positions of the same rows."""
    names = [each.name for each, size in context.layout.sizes if each.tokens and not each.samples and size > 1]
    return [context.mesh.get_group(name) for name in names] if context.mesh is not None else []


@frozen(eq=False)
class SharedRows:
    """The ranks that hold different positions of the same rows."""

    groups: Sequence[dist.ProcessGroup] = ()
    """One for each dimension that divides sequences."""
    ranks: int = field(init=False)
    """How many ranks share a row."""

    @ranks.default
    def _count(self) -> int:
        return math.prod(dist.get_world_size(group) for group in self.groups)

    @classmethod
    def of(cls, context: BuildContext) -> SharedRows:
        """Read the layout of a run."""
        return cls(shared_groups(context))

    def whole(self, values: Tensor, batch: Batch) -> Tensor:
        """Collect the values of all positions, bit-equal on all ranks that share the rows. Collective among them.

        The gradient of what a rank computes from the result reaches the values that it gave, once. So
        each rank may compute the whole objective and count it once, without a collective in the backward pass.

        Args:
            values: (B, s) of this rank's positions.
            batch: this rank's part, as a loss receives it.

        Returns:
            (B, S), in the order of the sequence.

        Raises:
            ForgeError: the batch does not show which positions a rank has.
        """
        if not self.groups:
            return values
        if PLACES not in batch:
            message = f"sequences are divided among {self.ranks} ranks, and batches have no {PLACES!r}"
            raise ForgeError(f"loss: {message}, which shows the positions of a rank; let the stage that divides add it")
        empty = values.new_zeros(len(values), values.shape[1] * self.ranks)
        own = empty.scatter(1, batch[PLACES], values)
        total = own.detach().clone()
        for group in self.groups:
            dist.all_reduce(total, group=group)
        # Each place has a value on one rank and zeros on the others: both sums are exact, and the difference is of
        # the other ranks alone
        return own + (total - own.detach())
