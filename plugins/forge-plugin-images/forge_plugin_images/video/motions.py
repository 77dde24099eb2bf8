"""Shapes in motion: what may move, in which direction and how fast, and the captions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from forge_plugin_images.video.moving_shapes import MovingShapes

SHAPES = ("disc", "square", "triangle", "ring", "cross")
COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (230, 40, 40),
    "green": (40, 190, 60),
    "blue": (60, 90, 250),
    "yellow": (240, 220, 40),
    "white": (245, 245, 245),
}
DIRECTIONS: Mapping[str, tuple[int, int]] = {
    "up": (0, -1),
    "down": (0, 1),
    "left": (-1, 0),
    "right": (1, 0),
    "up and left": (-1, -1),
    "up and right": (1, -1),
    "down and left": (-1, 1),
    "down and right": (1, 1),
}
"""Steps along x, to the right, and y, downwards."""


class Motion(NamedTuple):
    """The contents of a caption: what moves, in which direction, and how fast."""

    colour: str
    shape: str
    direction: str
    speed: str

    @property
    def caption(self) -> str:
        """Returns the sentence that is learned, such as "a red disc moves up slowly"."""
        return f"a {self.colour} {self.shape} moves {self.direction} {self.speed}"


class MotionSplit(NamedTuple):
    """Combinations of both parts, in an order without meaning."""

    training: list[Motion]
    held_out: list[Motion]


def split_motions(keys: MovingShapes) -> MotionSplit:
    """Hold out the combinations with the smallest hashes, so that one more word holds out nearly the same."""
    every = [Motion(*each) for each in product(keys.colours, keys.shapes, keys.directions, keys.speeds)]
    every.sort(key=lambda motion: hashlib.sha256(motion.caption.encode()).digest())
    return MotionSplit(every[keys.held_out :], every[: keys.held_out])
