"""Attention that sampled queries pay to all keys, computed beside the kernel that runs.

Shapes: B sequences, S positions, s positions of this rank, n sampled queries of each sequence, H query heads, K
key/value heads, G = H / K, E width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge_plugin_taps.site import Current, Marks, Site, pick

# A name since torch 2.13; earlier versions have the second one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SPANS = "attention_spans"
"""Batch entry (B, S): neighbours with equal numbers, 0 or more, attend to each other in both directions."""


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
            mixing: see `forge_kit.taps.TapPoint`.
            group: ranks that share sequences; None: this rank has all keys.
        """
        super().__init__(name, "pattern", current, values=True, gradient=False, copies=False)
        self.mixing, self.group = mixing, group

    def observe(self, q: Tensor, k: Tensor, batch: Mapping[str, Tensor], sinks: Tensor | None = None) -> None:
        """Keep the attention of the sampled positions among the queries (B, s, H, E) to the keys (B, s, K, E)."""
        marks = self.current.marks
        if marks is None or self.current.auxiliary.recomputing:
            return
        with torch.no_grad():
            self.keep(self._probabilities(q.detach(), k.detach(), batch, marks, sinks), marks)

    def _probabilities(
        self, q: Tensor, k: Tensor, batch: Mapping[str, Tensor], marks: Marks, sinks: Tensor | None
    ) -> Tensor:
        scores = self._scores(pick(q, marks.inside), self._whole(k))
        seen = self._visible(batch, marks, scores.shape[-1])
        scores = scores.masked_fill(~seen.unsqueeze(2), -torch.inf)
        if sinks is not None:  # takes part in the softmax, and has no value
            column = sinks.detach().to(scores.dtype).view(1, 1, -1, 1).expand(*scores.shape[:3], 1)
            return torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        return scores.softmax(-1)

    def _scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Scores of queries (B, n, H, E) and all keys (B, S, K, E), before the mask: (B, n, H, S)."""
        dtype = torch.promote_types(queries.dtype, torch.float32)
        grouped = queries.to(dtype).unflatten(2, (keys.shape[2], -1))
        scores = torch.einsum("bnkge,bske->bnkgs", grouped, keys.to(dtype)).flatten(2, 3)
        scores = scores * (self.mixing.get("scale") or queries.shape[-1] ** -0.5)
        cap = self.mixing.get("soft_cap")
        return (scores / cap).tanh() * cap if cap else scores

    def _visible(self, batch: Mapping[str, Tensor], marks: Marks, length: int) -> Tensor:
        """Which of S keys each sampled query sees: (B, n, S)."""
        keys = torch.arange(length, device=marks.inside.device)
        queries = marks.whole.unsqueeze(2)
        seen = keys <= queries
        if window := self.mixing.get("window"):
            seen = seen & (keys > queries - window)
        if "document_ids" in batch:
            numbers = _numbered(self._whole(batch["document_ids"]))
            seen = seen & self._equal(numbers, marks)
        if SPANS in batch:
            spans = self._whole(batch[SPANS])
            numbers = _numbered(spans, *([self._whole(batch["document_ids"])] if "document_ids" in batch else []))
            seen = seen | (self._equal(numbers, marks) & (spans >= 0).unsqueeze(1))
        return seen

    def _equal(self, numbers: Tensor, marks: Marks) -> Tensor:
        """Whether the number of each query's position is that of a key's, of (B, S): (B, n, S)."""
        return numbers.gather(1, marks.whole).unsqueeze(2) == numbers.unsqueeze(1)

    def _whole(self, x: Tensor) -> Tensor:
        """All positions of x (B, s, …), in the order of the sequence: (B, S, …)."""
        if self.group is None:
            return x
        ranks = self.group.size()
        parts = x.new_empty(ranks * len(x), *x.shape[1:])
        _all_gather(parts, x.contiguous(), group=self.group)
        together = parts.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)
        marks: Any = self.current.marks
        return together.index_select(1, marks.order[0])


def _numbered(*entries: Tensor) -> Tensor:
    """A number of each position (B, S), equal for neighbours that have equal entries."""
    starts = torch.zeros_like(entries[0], dtype=torch.bool)
    for entry in entries:
        starts[:, 1:] |= entry[:, 1:] != entry[:, :-1]
    return starts.cumsum(1)
