"""From an image to patches, and back.

V: values of a patch, in the order channel, frame, row, column; P: patches of a row, T: frames of a grid, H, W: height
and width in pixels, C: channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from forge_plugin_vision import Grid

if TYPE_CHECKING:
    from forge_plugin_vision import ImageFormat


def grid_of(height: int, width: int, form: ImageFormat) -> Grid:
    """Returns the grid of an image of this size."""
    return Grid(1, height // form.patch, width // form.patch)


def patches_of(pixels: np.ndarray, form: ImageFormat) -> np.ndarray:
    """Cut an image into patches, row by row.

    Args:
        pixels: (height, width, channels) uint8, or (height, width) of one channel; pixels beyond the last whole
            patch are left out.
        form: the encoder's format; a still image fills all frames of a patch.

    Returns:
        (patches, V) uint8.
    """
    side = form.patch
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    cut = (
        pixels[: rows * side, : columns * side]
        .reshape(rows, side, columns, side, form.channels)
        .transpose(0, 2, 4, 1, 3)
    )  # row, column, channel, y, x
    # A still image fills all frames of a patch: the encoder takes no fewer.
    frames = np.repeat(cut[:, :, :, None], form.frames, axis=3)
    return frames.reshape(rows * columns, form.values)


def frames_of(patches: np.ndarray, grid: np.ndarray, form: ImageFormat) -> np.ndarray:
    """Put the first image or clip of a row together again.

    Args:
        patches: (P, V) uint8.
        grid: (3,): entries of the time axis, rows and columns in patches.
        form: the encoder's format.

    Returns:
        (T, H, W, C) uint8: of an image, one frame for each frame of a patch.
    """
    entries, rows, columns = Grid(*map(int, grid)).plain
    entries = 1 if grid[0] < 0 else entries  # of an image in tiles that are joined: the whole in one tile
    cut = patches[: entries * rows * columns].reshape(
        entries, rows, columns, form.channels, form.frames, form.patch, form.patch
    )
    # Undoes the order in which `patches_of` puts the values of a patch
    ordered = cut.transpose(0, 4, 1, 5, 2, 6, 3)  # entry, frame, row, y, column, x, channel
    shape = entries * form.frames, rows * form.patch, columns * form.patch, form.channels
    return np.ascontiguousarray(ordered.reshape(shape))
