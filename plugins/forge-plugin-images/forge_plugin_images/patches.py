"""From an image to patches. V: values of a patch, in the order channel, frame, row, column."""

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
