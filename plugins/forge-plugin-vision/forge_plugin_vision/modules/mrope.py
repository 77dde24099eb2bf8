"""Rotary position encoding of frame, row and column. Shapes: B sequences, S positions, E width of a head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forge_plugin_transformer.modules.rotary import Rotary

POSITIONS = "positions_3d"
"""Batch entry (B, S, 3) int64: coordinates of each position on the axes frame, row and column."""


def axes(sections: Sequence[int], interleaved: bool) -> list[int]:
    """Returns the axis by which each pair of dimensions turns, 0 to 2; `sections` has the number of pairs of each."""
    if not interleaved:
        return [axis for axis, pairs in enumerate(sections) for _ in range(pairs)]
    # Row and column have every third pair until their numbers are reached, frame has the rest (Qwen3-VL).
    pairs = range(sum(sections))
    return [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in pairs]


class MultimodalRotary(Rotary):
    """Tables for positions on three axes, or on one as `Rotary`, for text alone."""

    entry = POSITIONS
    axis: Tensor

    def __init__(
        self,
        frequencies: Sequence[float],
        axes: Sequence[int],
        *,
        time: str,
        interval: float,
        amplitude: float,
        length: int,
        dtype: torch.dtype,
    ) -> None:
        """Set up the tables.

        Args:
            frequencies: radians a position for each of the E / 2 pairs.
            axes: axis by which each pair turns.
            time: `MultimodalRope.time`, which whoever computes positions uses.
            interval: positions of a second of a video, or from one entry of its time axis to the next; likewise.
            amplitude: factor on both tables.
            length: positions of the cached table of text.
            dtype: the model's compute dtype.
        """
        super().__init__(frequencies, amplitude=amplitude, length=length, dtype=dtype)
        self.axes, self.time, self.interval = tuple(axes), time, interval
        # Layers share tables by this key: equal frequencies on other axes make other tables.
        self.key = f"{self.key} {self.axes}"
        self.register_buffer("axis", torch.empty(len(axes), dtype=torch.int64), persistent=False)

    def init_buffers(self, device: torch.device) -> None:
        """Recomputes the tables for text, and the axis of each pair."""
        super().init_buffers(device)
        self.axis.copy_(torch.tensor(self.axes))

    def angles(self, positions: Tensor) -> Tensor:
        """Returns (B, S, 1, E / 2) radians, float64, of positions (B, S, 3) or (B, S)."""
        if positions.ndim == 2:
            return super().angles(positions)  # text alone: one coordinate for all axes
        return positions.index_select(-1, self.axis).unsqueeze(-2) * self.rates(positions.device)
