"""A sample as one picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BytesIO
from typing import NamedTuple

from attrs import define, field
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from forge_kit.tools.outputs import MARK
from forge_plugin_plan.data_view.look_pictures import Panel, colour_of, font_of, panels_of, title_of
from forge_plugin_plan.data_view.row_text import Line, Piece, Wrapping
from forge_plugin_plan.data_view.sheet import PositionIds, Sheet

WIDTH, MARGIN, GAP = 1280, 24, 14
"""Pixels: of the picture, around it, between its parts."""
TITLE, TEXT, SMALL = 18, 13, 11
"""Sizes of letters in pixels."""
LINE = 19
INK, QUIET, FAULT, RULE = "#1f2328", "#6e7781", "#b42318", "#d0d7de"
LEARNED, IGNORED = ("#116329", "#dafbe1"), ("#57606a", "#ffffff")
"""Letters and paper of tokens."""


class Canvas(NamedTuple):
    """What parts are drawn on."""

    image: Image.Image
    draw: ImageDraw.ImageDraw


Draw = Callable[[Canvas, int], None]
"""Draws a part whose top is at this pixel."""


@define
class Column:
    """Parts one below the other."""

    parts: list[tuple[int, Draw]] = field(factory=list)
    """Height and drawing of each."""

    def text(self, text: str, size: int = TEXT, colour: str = INK, left: int = MARGIN) -> None:
        """Add a text, in as many lines as it needs."""
        for line in _lines_of(text, size, WIDTH - MARGIN - left):
            self.parts.append((size + 6, _text(line, size, colour, left)))

    def space(self, height: int = GAP) -> None:
        self.parts.append((height, lambda canvas, top: None))

    def picture(self) -> Image.Image:
        """Returns the parts on white."""
        # Parts are drawn last, as the image needs the sum of their heights
        sheet = Image.new("RGB", (WIDTH, sum(height for height, _ in self.parts) + 2 * MARGIN), "white")
        canvas, top = Canvas(sheet, ImageDraw.Draw(sheet)), MARGIN
        for height, part in self.parts:
            part(canvas, top)
            top += height
        return sheet


def png_of(sheet: Sheet) -> bytes:
    """Returns a sample as a PNG."""
    column = Column()
    column.text(sheet.title, TITLE)
    column.space(4)
    for name, value in sheet.facts:
        column.text(f"{name}: {value}", colour=QUIET)
    for fault in sheet.faults:
        column.text(f"! {fault}", colour=FAULT)
    _add_visuals(column, sheet)
    _add_row(column, sheet)
    data, about = BytesIO(), PngInfo()
    # Marks the file as an output of Forge, which a later command may replace
    about.add_text("Software", MARK)
    column.picture().save(data, format="PNG", optimize=True, pnginfo=about)
    return data.getvalue()


def _add_visuals(column: Column, sheet: Sheet) -> None:
    """Add images side by side, and each clip below a separate title line."""
    # Images are collected up to the next clip, so that they share rows
    images: list[Panel] = []
    for visual in sheet.visuals:
        if not visual.is_clip:
            images.extend(panels_of(visual, sheet.position_ids))
            continue
        _add_panels(column, images)
        images = []
        column.space()
        column.text("; ".join(title_of(visual)), colour=colour_of(visual.number))
        _add_panels(column, [*panels_of(visual, sheet.position_ids)])
    _add_panels(column, images)


def _add_panels(column: Column, panels: Sequence[Panel]) -> None:
    row: list[tuple[int, Panel]] = []
    used = 0
    for panel in panels:
        width = _width(panel)
        if row and used + width > WIDTH - 2 * MARGIN:
            column.parts.append(_panels(row))
            row, used = [], 0
        row.append((MARGIN + used, panel))
        used += width + GAP
    if row:
        column.parts.append(_panels(row))


def _width(panel: Panel) -> int:
    words = (int(font_of(SMALL).getlength(line)) for line in (*panel.title, *panel.caption))
    return max([panel.picture.width, *words])


def _panels(row: Sequence[tuple[int, Panel]]) -> tuple[int, Draw]:
    step = SMALL + 3
    above, below = (max(len(getattr(panel, name)) for _, panel in row) * step for name in ("title", "caption"))
    height = max(panel.picture.height for _, panel in row)

    def draw_panels(canvas: Canvas, top: int) -> None:
        top += GAP
        for left, panel in row:
            bottom = top + above + panel.picture.height + 4
            canvas.image.paste(panel.picture, (left, top + above))
            for number, line in enumerate(panel.title):
                canvas.draw.text((left, top + number * step), line, panel.colour, font_of(SMALL))
            for number, line in enumerate(panel.caption):
                canvas.draw.text((left, bottom + number * step), line, QUIET, font_of(SMALL))

    return GAP + above + height + 4 + below, draw_panels


def _add_row(column: Column, sheet: Sheet) -> None:
    column.space()
    column.parts.append((LINE, _draw_legend))
    widths = gutter_widths(sheet.position_ids, sheet.pieces, font_of(SMALL).getlength)
    left = MARGIN + int(sum(widths)) + GAP
    names = [(each.name, width) for each, width in zip(sheet.position_ids, widths, strict=True)]
    column.parts.append((LINE, _gutter(names)))
    font = font_of(TEXT)
    for line in Wrapping(WIDTH - MARGIN - left, font.getlength).lines(sheet.pieces):
        if line.starts_document:
            column.parts.append((LINE, _rule(f"document {line.pieces[0].document + 1}")))
        numbers = [each.at(line.position) for each in sheet.position_ids]
        # A list and not the iterator, since drawing happens later
        column.parts.append((LINE, _line(line, [*zip(numbers, widths, strict=True)], left)))
    if sheet.left_out:
        column.text(f"… {sheet.left_out:,} more tokens; --tokens 0 shows all", colour=QUIET)


def gutter_widths(
    position_ids: Sequence[PositionIds], pieces: Sequence[Piece], measure: Callable[[str], float]
) -> list[float]:
    """Returns how much room the numbers at the left of lines need, for each kind of positions."""
    positions = [piece.position for piece in pieces]
    return [
        max(measure(each.name), *(measure(each.at(position)) for position in positions)) + measure("  ")
        for each in position_ids
    ]


def _draw_legend(canvas: Canvas, top: int) -> None:
    left = MARGIN
    for words, (ink, paper) in (("learned", LEARNED), ("not learned", IGNORED)):
        left = _word(canvas, left, top, words, ink, paper) + GAP
    words = "a token is learned as the label of the position before it; the numbers are of a line's first token"
    canvas.draw.text((left, top), words, QUIET, font_of(TEXT))


def _line(line: Line, numbers: Sequence[tuple[str, float]], left: int) -> Draw:
    def draw_line(canvas: Canvas, top: int) -> None:
        _gutter(numbers)(canvas, top)
        right = left
        for piece in line.pieces:
            right = _word(canvas, right, top, piece.text, *colours_of(piece), is_special=piece.is_special)

    return draw_line


def _gutter(numbers: Iterable[tuple[str, float]]) -> Draw:
    def draw_numbers(canvas: Canvas, top: int) -> None:
        right = float(MARGIN)
        for number, width in numbers:
            right += width
            canvas.draw.text(
                (right - font_of(SMALL).getlength("  "), top + 2), number, QUIET, font_of(SMALL), anchor="ra"
            )

    return draw_numbers


def colours_of(piece: Piece) -> tuple[str, str]:
    """Returns the colours of letters and paper of a piece."""
    if piece.style == "visual":
        return "#ffffff", colour_of(piece.visual) if piece.visual >= 0 else FAULT
    return LEARNED if piece.style == "learned" else IGNORED


def _word(canvas: Canvas, left: float, top: int, text: str, ink: str, paper: str, is_special: bool = False) -> int:
    font = font_of(TEXT)
    right = left + font.getlength(text)
    canvas.draw.rectangle((left, top - 1, right, top + LINE - 3), paper)
    canvas.draw.text((left, top), text, ink, font)
    if is_special:
        canvas.draw.line((left, top + LINE - 3, right, top + LINE - 3), ink)
    return round(right)


def _rule(words: str) -> Draw:
    def draw_rule(canvas: Canvas, top: int) -> None:
        start = MARGIN + font_of(SMALL).getlength(words) + 8
        canvas.draw.text((MARGIN, top + 2), words, QUIET, font_of(SMALL))
        canvas.draw.line((start, top + 9, WIDTH - MARGIN, top + 9), RULE)

    return draw_rule


def _text(line: str, size: int, colour: str, left: int) -> Draw:
    return lambda canvas, top: canvas.draw.text((left, top), line, colour, font_of(size))


def _lines_of(text: str, size: int, width: int) -> Iterator[str]:
    """Yields a text in lines, divided between words where it can be."""
    font, line = font_of(size), ""
    for word in text.split(" "):
        longer = f"{line} {word}" if line else word
        # A single word that is wider than the line stays whole
        if line and font.getlength(longer) > width:
            yield line
            longer = word
        line = longer
    yield line
