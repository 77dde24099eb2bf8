"""Draws images with what a model said of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from forge_plugin_vision import GRIDS, PATCHES

if TYPE_CHECKING:
    from forge_plugin_images.answering import Answer
    from forge_plugin_vision import ImageFormat

COLUMNS = 4
WIDTH, LINE, MARGIN = 240, 16, 8
"""Pixels: of a cell, of a line of text, between cells."""
RIGHT, WRONG, TEXT = "#1a7f37", "#b42318", "#57606a"


def draw_answers(answers: Sequence[Answer], form: ImageFormat, path: Path, step: int) -> None:
    """Write a picture of images, each with what the model said, green where it is right, and the bits it took."""
    cells = [_cell(answer, form) for answer in answers]
    height = max(cell.height for cell in cells)
    rows = -(-len(cells) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (WIDTH + MARGIN) + MARGIN, rows * (height + MARGIN) + 2 * LINE), "white")
    right = sum(answer.is_right for answer in answers)
    title = f"after step {step:,}: {right} of {len(answers)} right (green)"
    ImageDraw.Draw(sheet).text((MARGIN, MARGIN), title, TEXT, _font())
    for number, cell in enumerate(cells):
        row, column = divmod(number, COLUMNS)
        sheet.paste(cell, (MARGIN + column * (WIDTH + MARGIN), 2 * LINE + row * (height + MARGIN)))
    sheet.save(path)


def _cell(answer: Answer, form: ImageFormat) -> Image.Image:
    picture = Image.fromarray(pixels_of(answer.row[PATCHES], answer.row[GRIDS][0], form))
    scale = WIDTH / picture.width
    picture = picture.resize((WIDTH, max(1, round(picture.height * scale))), Image.Resampling.NEAREST)
    cell = Image.new("RGB", (WIDTH, picture.height + 3 * LINE), "white")
    cell.paste(picture, (0, 0))
    draw, below = ImageDraw.Draw(cell), picture.height + 2
    draw.text((0, below), _short(answer.said) or "(nothing)", RIGHT if answer.is_right else WRONG, _font())
    note = f"{answer.bits:.1f} bits from the image"
    draw.text((0, below + LINE), note if answer.is_right else f"{_short(answer.expected)}; {note}", TEXT, _font())
    return cell


def pixels_of(patches: np.ndarray, grid: np.ndarray, form: ImageFormat) -> np.ndarray:
    """Put the first image of a row together again.

    Args:
        patches: (P, V) uint8.
        grid: (3,): frames, rows and columns in patches.
        form: the encoder's format.

    Returns:
        (height, width, channels) uint8: the first frame.
    """
    _, rows, columns = (int(side) for side in grid)
    cut = patches[: rows * columns].reshape(rows, columns, form.channels, form.frames, form.patch, form.patch)
    first = cut[:, :, :, 0].transpose(0, 3, 1, 4, 2)  # row, y, column, x, channel
    return np.ascontiguousarray(first.reshape(rows * form.patch, columns * form.patch, form.channels))


def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(12)


def _short(text: str, most: int = 30) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
