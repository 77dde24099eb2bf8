"""Attention that sampled queries pay to all keys, computed beside the kernel that runs.

Shapes: B sequences, S positions, s positions of this rank, n sampled queries of each sequence, H query heads, K
key/value heads, E width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge_kit.nn.attention_pattern import DOCUMENTS, SPANS, attention_pattern
from forge_plugin_taps.site import Current, Marks, Site, pick

# A name since torch 2.13; earlier versions have the second one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class PatternSite(Site):
    """The attention of one module: (B, n, H, S), in at least float32."""

    # Beside the kernel and not in its place: another one would compute other numbers, and train another model.

    def __init__(
        self, name: str, current: Current, mixing: Mapping[str, float], group: dist.ProcessGroup | None
    ) -> None:
        """Set up the point.

        Args:
            name: its name in the model.
            current: shared by all sites.
            mixing: see `forge_kit.nn.taps.TapPoint`.
            group: ranks that share sequences; None: this rank has all keys.
        """
        super().__init__(name, "pattern", current, values=True, gradient=False, copies=False)
        self.mixing, self.group = mixing, group

    def observe(self, q: Tensor, k: Tensor, batch: Mapping[str, Tensor], sinks: Tensor | None = None) -> None:
        """Keep the attention of the sampled positions among the queries (B, s, H, E) to the keys (B, s, K, E)."""
        marks = self.current.marks
        # The pass that is recomputed was kept the first time.
        if marks is None or self.current.auxiliary.recomputing:
            return
        with torch.no_grad():
            self.keep(self._probabilities(q.detach(), k.detach(), batch, marks, sinks), marks)

    def _probabilities(
        self, q: Tensor, k: Tensor, batch: Mapping[str, Tensor], marks: Marks, sinks: Tensor | None
    ) -> Tensor:
        entries = {name: self._whole(batch[name]) for name in (DOCUMENTS, SPANS) if name in batch}
        return attention_pattern(pick(q, marks.inside), self._whole(k), marks.whole, entries, self.mixing, sinks)

    def _whole(self, x: Tensor) -> Tensor:
        """All positions of x (B, s, …), in the order of the sequence: (B, S, …)."""
        if self.group is None:
            return x
        ranks = self.group.size()
        # Gathered along the batch: the collective concatenates the first dimension only
        parts = x.new_empty(ranks * len(x), *x.shape[1:])
        _all_gather(parts, x.contiguous(), group=self.group)
        together = parts.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)
        marks: Any = self.current.marks
        # The order is the same in all rows
        return together.index_select(1, marks.order[0])
