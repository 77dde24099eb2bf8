"""Metrics of positions that no routed expert computes. Shapes: B sequences, S positions."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_plugin_moma.modules.groups import Groups, is_of

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext

SKIPPED = "moma/skipped"
"""Count of the positions that no routed expert computes, by modality, as a share of all positions; the last entry: of
modalities without experts."""


class Skipped:
    """Counts a layer's skipped positions. Its metrics are means over layers."""

    def __init__(self, context: BuildContext, groups: Groups) -> None:
        self._names = tuple(groups.sizes)
        self._pieces = context.layout.cp
        self._counter = context.auxiliary.counter(SKIPPED, context.layer or 0, unit="sequence")
        context.auxiliary.summarise(SKIPPED, functools.partial(summarise_skipped, names=self._names))

    def count(self, ids: Tensor, skipped: Tensor) -> None:
        """Add a micro-batch, given its `input_ids` (B, S) and whether no routed expert computes a position (B, S)."""
        of = [skipped & is_of(name, ids) for name in self._names]
        numbers = torch.stack([part.sum() for part in (*of, skipped)]).double()
        numbers[-1] -= numbers[:-1].sum()  # left: modalities without experts
        # A share of the whole sequence, whose pieces other ranks count: sums over ranks are then means over sequences.
        self._counter.add(numbers / (ids.shape[1] * self._pieces))


def summarise_skipped(rows: Mapping[int, Tensor], names: Sequence[str]) -> Mapping[str, Tensor]:
    """Returns the mean share over layers, for each modality with experts, and for all others."""
    shares = torch.stack(list(rows.values())).mean(0)
    return dict(zip([*(f"moma/{name}/skipped" for name in names), "moma/without_experts"], shares, strict=True))
