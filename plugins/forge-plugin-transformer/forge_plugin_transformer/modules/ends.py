"""What comes before a transformer's layers and after them. Shapes: B sequences, S positions, D model width, V words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forge_core.contracts.data import Batch
from forge_core.contracts.errors import ForgeError
from forge_kit.nn.modules import Embedding, LinearHead


class ScaledEmbedding(Embedding):
    """Rows of a table times `scale`, both rounded to `dtype` first (Gemma)."""

    # Not in the model's `embed`: features of images, which take the places of these rows, have no such factor.

    def __init__(self, vocab_size: int, dim: int, *, scale: float, dtype: torch.dtype, std: float) -> None:
        super().__init__(vocab_size, dim, dtype=dtype, std=std)
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        """(…) int64 to (…, D). The factor is rounded to the dtype of the rows before the product."""
        rows = super().forward(ids)
        # A tensor of the rows' dtype, not a number, which would enter the product unrounded
        return rows * rows.new_full((), self.scale)


class BoundedHead(LinearHead):
    """cap tanh(scale (h Wᵀ + b) / cap); without a cap (0), scale (h Wᵀ + b). b is 0 without `bias`."""

    def __init__(self, dim: int, vocab_size: int, *, scale: float, cap: float, std: float, bias: bool = False) -> None:
        super().__init__(dim, vocab_size, bias=bias, std=std)
        self.scale, self.cap = scale, cap

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, D) to (…, V). Scales before the cap, so that `cap` bounds the result."""
        logits = super().logits(hidden) * self.scale
        return (logits / self.cap).tanh() * self.cap if self.cap else logits


class PositionTable(Embedding):
    """A learned vector for each position, (B, S) int64 to (B, S, D)."""

    def forward(self, positions: Tensor) -> Tensor:
        """(B, S) int64 to (B, S, D); a number below 0 has the row of position 0."""
        # Padding on the left has negative positions, and nothing reads what it becomes.
        return super().forward(positions.clamp(min=0))


class PositionCount:
    """Number of the next position, in a cache for generation."""

    def __init__(self, rows: int, length: int) -> None:
        """Set up the count.

        Raises:
            ForgeError: a table of `rows` has no `length` positions.
        """
        if length > rows:
            message = f"{length} positions of prompt and continuation are more than model.learned_positions = {rows}"
            raise ForgeError(f"{message}; generate fewer tokens (--max-tokens), or shorten the prompt")
        self._next = 0

    def numbered(self, batch: Batch) -> Batch:
        """Returns the batch with `positions`, by default those after the ones before."""
        ids = batch["input_ids"]
        start, self._next = self._next, self._next + ids.shape[1]
        # Last, so that the batch's own positions are used where it has them: rows with padding do
        return {"positions": torch.arange(start, self._next, device=ids.device).expand(len(ids), -1), **batch}

    forgets = ""

    def forget(self, count: int) -> None:
        """Goes back by `count` positions."""
        self._next -= count

    @property
    def joinable(self) -> bool:
        """Always: one number serves all rows, as their newest positions are in one column."""
        return True

    def joined(self, parts: Sequence[tuple[PositionCount, Tensor]], columns: int, length: int) -> PositionCount:
        """Returns the count of a cache of rows of several; see `forge_kit.nn.generation.JoinsRows`."""
        # Not checked against the table: `length` counts from the longest row, and that with most to come may be short.
        joined = PositionCount(0, 0)
        joined._next = columns
        return joined
