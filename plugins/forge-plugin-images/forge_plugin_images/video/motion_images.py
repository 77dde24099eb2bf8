"""Frames that show a shape in motion.

T: frames of a clip, H, W: height and width in pixels. x grows to the right, y downwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from forge_plugin_images.video.motions import COLOURS, DIRECTIONS, SHAPES

if TYPE_CHECKING:
    from forge_plugin_images.video.motions import Motion
    from forge_plugin_images.video.moving_shapes import MovingShapes

Outline = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Distance of points (x, y) from the edge of a shape around (0, 0), negative inside; all in units of its radius."""


def _cross(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    across, along = np.abs(x), np.abs(y)
    return np.minimum(np.maximum(across - 1.1, along - 0.35), np.maximum(across - 0.35, along - 1.1))


OUTLINES: Mapping[str, Outline] = {
    "disc": lambda x, y: np.hypot(x, y) - 1,
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) - 0.9,
    "triangle": lambda x, y: np.maximum(0.87 * np.abs(x) - 0.5 * y - 0.5, y - 0.8),
    "ring": lambda x, y: np.abs(np.hypot(x, y) - 0.75) - 0.3,
    "cross": _cross,
}
"""Of each of `SHAPES`."""
BRIGHTNESS = 40.0, 60.0
"""Of the grey behind a shape, from and to."""


def place(start: np.ndarray, direction: str, speed: int, frame: int, size: tuple[int, int]) -> np.ndarray:
    """Returns where a shape is: (2,) int64, x and y.

    What leaves a side enters at the opposite one. So starts and places in any one frame are paired one to one: if
    starts are equally likely, so are places, whatever the motion, and a single frame contains no information about it.

    Args:
        start: (2,), where it is in the first frame.
        direction: a key of `DIRECTIONS`.
        speed: pixels a frame along each axis.
        frame: number of the frame.
        size: height and width.
    """
    return (start + frame * speed * np.array(DIRECTIONS[direction])) % (size[1], size[0])


def draw_motion(keys: MovingShapes, motion: Motion, drawing: int) -> np.ndarray:
    """Returns the frames of a clip: (T, H, W, 3) uint8.

    Start, size and background depend on colour, shape and `drawing` alone, so clips of all motions begin with the same
    frame.
    """
    # Indices in the tables of all words: other words in a job leave the drawings of its clips as they are
    seed = [keys.seed, drawing, list(COLOURS).index(motion.colour), SHAPES.index(motion.shape)]
    generator = np.random.default_rng(seed)
    height, width = keys.size
    start = generator.integers(0, (width, height))
    radius = generator.uniform(*keys.radius)
    ground = generator.uniform(*BRIGHTNESS) + generator.normal(0, keys.noise, (height, width))
    speed = keys.speeds[motion.speed]
    places = (place(start, motion.direction, speed, frame, keys.size) for frame in range(keys.frames))
    covers = (_cover(OUTLINES[motion.shape], at, radius, keys.size) for at in places)
    frames = [ground[..., None] * (1 - cover) + np.array(COLOURS[motion.colour]) * cover for cover in covers]
    return np.stack(frames).round().clip(0, 255).astype(np.uint8)


def _cover(outline: Outline, at: np.ndarray, radius: float, size: tuple[int, int]) -> np.ndarray:
    """Returns (H, W, 1): the share of each pixel that the shape covers; it wraps around at each side."""
    # Signed distances from the middle by the shorter way around each side
    y, x = (
        (np.arange(side) - middle + side / 2) % side - side / 2 for side, middle in zip(size, at[::-1], strict=True)
    )
    distance = outline(x[None, :] / radius, y[:, None] / radius) * radius
    # Antialiased: the edge is one pixel wide
    return (0.5 - distance).clip(0, 1)[..., None]
