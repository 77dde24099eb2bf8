"""Turns frames upright, according to a file's display matrix."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Turn(NamedTuple):
    """What makes a frame upright: first the transposition, then the mirrorings."""

    transposed: bool = False
    rows: bool = False
    """Whether the order of rows is reversed."""
    columns: bool = False

    @classmethod
    def of(cls, matrix: np.ndarray) -> Turn:
        """Returns the turn nearest to a display matrix.

        Args:
            matrix: (2, 2), whose product with a row vector (x, y) of the frame, y downwards, is where that pixel is
                shown (ISO/IEC 14496-12, 8.5.2.3). Only signs and the larger diagonal count.
        """
        (a, b), (c, d) = matrix
        if abs(b) + abs(c) > abs(a) + abs(d):
            return cls(True, rows=b < 0, columns=c < 0)
        return cls(False, rows=d < 0, columns=a < 0)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Returns height and width of the upright frame."""
        return (width, height) if self.transposed else (height, width)

    def upright(self, pixels: np.ndarray) -> np.ndarray:
        """Returns the upright frame; `pixels` is (height, width, channels)."""
        if self.transposed:
            pixels = pixels.transpose(1, 0, 2)
        return np.ascontiguousarray(pixels[:: -1 if self.rows else 1, :: -1 if self.columns else 1])
