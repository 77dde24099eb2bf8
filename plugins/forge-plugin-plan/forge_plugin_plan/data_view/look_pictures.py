"""Pictures of images and clips: cut along the patches, and in another colour along what becomes one position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from forge_plugin_plan.data_view.row_text import time_text
from forge_plugin_plan.data_view.sheet import PositionIds
from forge_plugin_plan.data_view.visuals import Visual

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
COLOURS = ("#b35900", "#0b6fa4", "#8a3ffc", "#00766c", "#b3266b", "#5b6b00", "#a11d1d", "#3a4fd0")
"""Of images and clips, in turn: dark enough for white letters."""
IMAGE_SIDE, FRAME_SIDE = 400, 180
"""Longest side of a picture of an image, and of a frame of a clip, in pixels, without the cuts."""
ENLARGED = 32
"""Pixels of a patch in a picture, at most, where that is more than its own."""
FRAME_GAP = 3
"""Pixels between the frames of a clip that share patches."""
CUT, POSITION_CUT = 1, 2
"""Pixels between two patches, and between two squares of patches that become a position each."""


@cache
def font_of(size: int) -> Font:
    """Returns DejaVu's monospaced letters where matplotlib, which brings them, is installed, or else Pillow's own."""
    if find_spec("matplotlib") is None:
        return ImageFont.load_default(size)
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSansMono.ttf")), size)


def colour_of(number: int) -> str:
    """The colour of an image or a clip by its number."""
    return COLOURS[number % len(COLOURS)]


class Panel(NamedTuple):
    """A picture with words above and below."""

    title: Sequence[str]
    """In `colour`."""
    picture: Image.Image
    caption: Sequence[str]
    colour: str


def panels_of(visual: Visual, position_ids: Sequence[PositionIds]) -> Iterator[Panel]:
    """Yields the pictures of an image, one, or of a clip, one for each entry of its time axis."""
    for entry in range(visual.grid.frames):
        positions = visual.positions_of(entry)
        caption = [each.range(positions) for each in position_ids if len(positions)]
        title = [f"{visual.name}: {time_text(visual, entry)}"] if visual.is_clip else title_of(visual)
        frames = [cut_picture(frame, visual) for frame in visual.shown_frames(entry)]
        # Frames of one entry share patches, and so are shown as one picture
        yield Panel(title, _side_by_side(frames), caption, colour_of(visual.number))


def title_of(visual: Visual) -> list[str]:
    """Returns the sizes of an image or a clip."""
    count, side = len(visual.positions), visual.side
    each = f", each of {side} x {side} patches" if side > 1 else ", each of a patch" if side else ""
    return [f"{visual.name}: {visual.size}", f"{count:,} position{'s' * (count != 1)}{each}"]


def cut_picture(frame: np.ndarray, visual: Visual) -> Image.Image:
    """Returns a frame with its patches apart, as the encoder and the adapter divide it.

    Args:
        frame: (height, width, channels) uint8.
        visual: what it is a frame of.
    """
    rows, columns = visual.grid.rows, visual.grid.columns
    most = FRAME_SIDE if visual.is_clip else IMAGE_SIDE
    # At least two pixels, so that cuts are not wider than patches
    side = max(2, min(most // max(rows, columns), max(visual.patch, ENLARGED)))
    # Averages where a patch shrinks; pixels remain visible as squares where it grows
    filter_ = Image.Resampling.BOX if side < visual.patch else Image.Resampling.NEAREST
    pixels = np.asarray(_in_colour(frame).resize((columns * side, rows * side), filter_))
    ys, xs = (_starts(count, visual.side, side) for count in (rows, columns))
    height, width = (int(starts[-1]) + side + POSITION_CUT for starts in (ys, xs))
    strong = np.array(_rgb(colour_of(visual.number)))
    sheet = np.empty((height, width, 3), np.uint8)
    # The background that remains between patches forms the cuts
    sheet[:] = strong
    if visual.side > 1:  # inside of a position, cuts are pale
        sheet[np.ix_(_inside(ys, visual.side, side), _inside(xs, visual.side, side))] = (strong + 2 * 255) // 3
    at = np.arange(side)
    sheet[np.ix_((ys[:, None] + at).ravel(), (xs[:, None] + at).ravel())] = pixels
    cut = Image.fromarray(sheet)
    return cut if visual.is_clip or not visual.side else _numbered(cut, visual, ys[:: visual.side])


def _numbered(cut: Image.Image, visual: Visual, tops: np.ndarray) -> Image.Image:
    """Returns a picture with the position of the first square of each row of squares at its left."""
    font, columns = font_of(10), visual.grid.columns // visual.side
    numbers = visual.positions[::columns]
    width = max((int(font.getlength(str(number))) for number in numbers), default=0) + 6
    sheet = Image.new("RGB", (width + cut.width, cut.height), "white")
    sheet.paste(cut, (width, 0))
    draw, free = ImageDraw.Draw(sheet), 0
    # Not strict: a faulty row may have fewer positions than squares
    for number, top in zip(numbers, tops.tolist(), strict=False):
        if top >= free:  # rows may be lower than their numbers
            draw.text((width - 4, top), str(number), colour_of(visual.number), font, anchor="ra")
            free = top + 11
    return sheet


def _starts(count: int, per_position: int, side: int) -> np.ndarray:
    """Returns (count,): where patches start along one side of a picture."""
    number = np.arange(count)
    # Without squares of positions, all cuts have the same width
    positions = number // per_position if per_position else 0 * number
    cuts = POSITION_CUT + positions * POSITION_CUT + (number - positions) * CUT
    return number * side + cuts


def _inside(starts: np.ndarray, per_position: int, side: int) -> np.ndarray:
    """Returns the pixels along one side that lie within a position, the cuts between its patches included."""
    ends = starts[per_position - 1 :: per_position] + side
    return np.concatenate([np.arange(a, b) for a, b in zip(starts[::per_position], ends, strict=True)])


def _in_colour(frame: np.ndarray) -> Image.Image:
    """A frame of three channels, of which one is grey; of any other number, the first three."""
    channels = frame.shape[2]
    return Image.fromarray(np.repeat(frame[:, :, :1], 3, 2) if channels < 3 else np.ascontiguousarray(frame[:, :, :3]))


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[start : start + 2], 16) for start in (1, 3, 5))


def _side_by_side(pictures: Sequence[Image.Image]) -> Image.Image:
    if len(pictures) == 1:
        return pictures[0]
    width = sum(picture.width + FRAME_GAP for picture in pictures) - FRAME_GAP
    sheet = Image.new("RGB", (width, max(picture.height for picture in pictures)), "white")
    left = 0
    for picture in pictures:
        sheet.paste(picture, (left, 0))
        left += picture.width + FRAME_GAP
    return sheet
