"""What the tests of datasets share: a table `video`, and what a row shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from forge_plugin_images.patches import frames_of
from forge_plugin_images.video import Frames, Uniform
from forge_plugin_vision import ViT
from forge_testing.clips import read_bar_code
from forge_testing.images import tiny_model

MODEL = tiny_model(16, 48, any_size=True, images_per_sequence=3, patches_per_sequence=144)
"""Patches of 8 pixels: a frame of `clips` has 2 x 6 of them."""
FORM = ViT(patch=8).image_format()


def frames(most: int = 4, **keys: Any) -> Frames:
    """A table of so many frames at most."""
    return Frames(sampling=Uniform(fps=8, max_frames=most, min_frames=1), **keys)


def shown(row: Mapping[str, np.ndarray]) -> list[list[int]]:
    """Returns the numbers that the frames of a row's clips carry, clip by clip; of an image -1."""
    numbers, start = [], 0
    for count, rows, columns in row["grids"].tolist():
        if count:
            own = row["patches"][start : start + count * rows * columns].reshape(count, rows * columns, -1)
            pictures = [frames_of(each, np.array([1, rows, columns]), FORM)[0] for each in own]
            numbers.append([read_bar_code(picture) if columns > 2 else -1 for picture in pictures])
            start += count * rows * columns
    return numbers
