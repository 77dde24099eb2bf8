"""Rows whose clips show their frames in another order. Shapes: P patches of a row, V values of a patch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from forge_plugin_vision import GRIDS, PATCHES, Grid

if TYPE_CHECKING:
    from forge_plugin_vision import ImageFormat

Row = Mapping[str, np.ndarray]
Order = Callable[[int, int], np.ndarray]
"""(number of the clip in its row, frames of the clip) -> the frame to show in each frame's place."""


def has_clips(row: Row) -> bool:
    """Whether a row has a grid of several entries on the time axis."""
    return GRIDS in row and bool((row[GRIDS][:, 0] > 1).any())


def shuffled(seed: int) -> Order:
    """Returns a random order of each clip's frames, never the one that they have, as a function of `seed` alone."""

    def order(clip: int, frames: int) -> np.ndarray:
        # Seeded by the clip as well, so that clips of one row do not share an order
        drawn = np.random.default_rng([seed, clip]).permutation(frames)
        # A clip that keeps its order would count as shuffled, and `time_bits` would be too small.
        return np.roll(drawn, 1) if (drawn == np.arange(frames)).all() else drawn

    return order


def still(_clip: int, frames: int) -> np.ndarray:
    """Returns the order in which every frame is the first one."""
    return np.zeros(frames, np.int64)


def reordered(row: Row, form: ImageFormat, order: Order) -> Row:
    """Returns the row with the frames of its clips in another order; images, tokens and timestamps stay as they are.

    The frames of the clip are reordered one by one, even if an entry of the time axis has several (`form.frames`).
    """
    patches, start = row[PATCHES].copy(), 0
    for clip, (entries, rows, columns) in enumerate(row[GRIDS].tolist()):
        stop = start + Grid(entries, rows, columns).patches  # no product for tiles that are joined
        if entries > 1:  # neither an image nor tiles that are joined, whose number is negative
            # A patch has the values of its frames channel by channel.
            apart = patches[start:stop].reshape(entries, rows * columns, form.channels, form.frames, form.patch**2)
            frames = apart.transpose(0, 3, 1, 2, 4).reshape(-1, rows * columns, form.channels, form.patch**2)
            shown = frames[order(clip, len(frames))].reshape(entries, form.frames, *frames.shape[1:])
            patches[start:stop] = shown.transpose(0, 2, 3, 1, 4).reshape(stop - start, -1)
        start = stop
    return {**row, PATCHES: patches}
