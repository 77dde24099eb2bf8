"""Draws images, and clips as film strips, with what a model said of them.

T: frames of a grid, H, W: height and width in pixels, C: channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from forge_plugin_images.patches import frames_of
from forge_plugin_vision import GRIDS, PATCHES

if TYPE_CHECKING:
    from forge_plugin_vision import ImageFormat
    from forge_plugin_vlm_eval.row_answers import Answer

COLUMNS, CLIP_COLUMNS = 4, 2
"""Cells beside each other: of images, and where there are clips."""
WIDTH, CLIP_WIDTH, LINE, MARGIN = 240, 488, 16, 8
"""Pixels: of a cell, of one with a clip, of a line of text, between cells."""
FRAMES, GAP = 8, 4
"""Frames of a film strip at most, and pixels between two."""
RIGHT, WRONG, TEXT = "#1a7f37", "#b42318", "#57606a"


def draw_answers(answers: Sequence[Answer], form: ImageFormat, path: Path, step: int) -> None:
    """Write a picture of images and film strips, each with what the model said, and the bits it took.

    Right answers are green. Below a film strip are also the model's answers to its first frame alone, and to its frames
    in another order.
    """
    has_clips = any(answer.without_motion for answer in answers)
    columns, width = (CLIP_COLUMNS, CLIP_WIDTH) if has_clips else (COLUMNS, WIDTH)
    cells = [_cell(answer, form) for answer in answers]
    height = max(cell.height for cell in cells)
    rows = -(-len(cells) // columns)
    sheet = Image.new("RGB", (columns * (width + MARGIN) + MARGIN, rows * (height + MARGIN) + 2 * LINE), "white")
    right = sum(answer.is_right for answer in answers)
    title = f"after step {step:,}: {right} of {len(answers)} right (green)"
    ImageDraw.Draw(sheet).text((MARGIN, MARGIN), title, TEXT, _font())
    for number, cell in enumerate(cells):
        row, column = divmod(number, columns)
        sheet.paste(cell, (MARGIN + column * (width + MARGIN), 2 * LINE + row * (height + MARGIN)))
    sheet.save(path)


def _cell(answer: Answer, form: ImageFormat) -> Image.Image:
    frames = frames_of(answer.row[PATCHES], answer.row[GRIDS][0], form)
    picture = _still(frames[0]) if len(frames) == 1 or not answer.without_motion else _film_strip(frames)
    others = list(answer.without_motion.items())
    cell = Image.new("RGB", (picture.width, picture.height + (3 + len(others)) * LINE), "white")
    cell.paste(picture, (0, 0))
    draw, below = ImageDraw.Draw(cell), picture.height + 2
    # About 30 letters of this font fit into the width of an image
    most = 30 * picture.width // WIDTH
    draw.text((0, below), _short(answer.said, most) or "(nothing)", RIGHT if answer.is_right else WRONG, _font())
    note = f"{answer.bits:.1f} bits from the {'clip' if others else 'image'}"
    note = note if answer.is_right else f"{_short(answer.expected, most)}; {note}"
    draw.text((0, below + LINE), note, TEXT, _font())
    for line, (order, said) in enumerate(others, 2):
        colour = RIGHT if answer.is_right_with(order) else WRONG
        draw.text((0, below + line * LINE), f"{order}: {_short(said, most)}", colour, _font())
    return cell


def _still(frame: np.ndarray) -> Image.Image:
    # Nearest pixels, so that the picture shows what the model saw and not a smooth version of it
    picture = _picture(frame)
    return picture.resize((WIDTH, max(1, round(picture.height * WIDTH / picture.width))), Image.Resampling.NEAREST)


def _picture(frame: np.ndarray) -> Image.Image:
    """Returns a frame (H, W, C) of colours or grey."""
    return Image.fromarray(frame if frame.shape[2] > 1 else frame[:, :, 0])


def _film_strip(frames: np.ndarray) -> Image.Image:
    """Returns frames (T, H, W, C) side by side, evenly chosen where they are many."""
    shown = frames[np.linspace(0, len(frames) - 1, min(len(frames), FRAMES)).round().astype(int)]
    width = (CLIP_WIDTH + GAP) // len(shown) - GAP
    height = max(1, round(shown.shape[1] * width / shown.shape[2]))
    strip = Image.new("RGB", (CLIP_WIDTH, height), "white")
    for number, frame in enumerate(shown):
        strip.paste(_picture(frame).resize((width, height), Image.Resampling.NEAREST), (number * (width + GAP), 0))
    return strip


def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(12)


def _short(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
