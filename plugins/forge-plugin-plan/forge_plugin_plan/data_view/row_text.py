"""The row of a sample as pieces of text, and these in lines of a width.

S: positions of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from attrs import define, field, frozen

from forge_plugin_plan.data_view.decoding import Decoder
from forge_plugin_plan.data_view.samples import Sample, Token
from forge_plugin_plan.data_view.screen import visible
from forge_plugin_plan.data_view.visuals import Visual

Style = Literal["learned", "ignored", "visual", "padding"]
LINE_END = "↵"


class Piece(NamedTuple):
    """Tokens that are shown together: one, nearly always."""

    text: str
    style: Style
    position: int
    """Of the first token in the row; -1: it is a label only."""
    tokens: int
    document: int
    """Number of its document, from 0; -1: none."""
    is_special: bool = False
    visual: int = -1
    """Number of the image or clip whose positions these are."""


@frozen
class Line:
    """Pieces side by side."""

    pieces: Sequence[Piece]
    starts_document: bool

    @property
    def position(self) -> int:
        return self.pieces[0].position


def pieces_of(sample: Sample, decoder: Decoder, visuals: Sequence[Visual], most: int) -> tuple[list[Piece], int]:
    """Returns the first `most` tokens (0: all) in pieces, and how many tokens are left out."""
    owners = {int(position): visual.number for visual in visuals for position in visual.positions}
    tokens = sample.tokens()
    shown = tokens[:most] if most else tokens
    pieces: list[Piece] = []

    def kind(token: Token) -> tuple[bool, int, bool, int]:
        return token.id < 0, owners.get(token.position, -1), token.learned, token.document

    for (is_visual, owner, learned, document), group in groupby(shown, kind):
        run = list(group)
        if is_visual:
            text = _visual_text(visuals[owner], run) if owner >= 0 else f"{len(run):,} positions of no image"
            pieces.append(Piece(text, "visual", run[0].position, len(run), document, visual=owner))
        else:
            pieces.extend(_text_pieces(run, decoder, "learned" if learned else "ignored", document))
    # Padding follows the last token, so it is shown only if no token is left out
    if sample.padding and len(shown) == len(tokens):
        start = len(sample.inputs) - sample.padding
        pieces.append(Piece(f"{sample.padding:,} positions of padding", "padding", start, sample.padding, -1))
    return pieces, len(tokens) - len(shown)


def _visual_text(visual: Visual, run: Sequence[Token]) -> str:
    count = f"{len(run):,} position{'s' * (len(run) > 1)}"
    # A run may join several entries, or be cut by --tokens; then it has no single time
    entries = [entry for entry in range(visual.grid.frames) if _covers(visual.positions_of(entry).tolist(), run)]
    if visual.grid.frames == 1 or not entries:
        return f"{visual.name}: {count}"
    return f"{visual.name}, {time_text(visual, entries[0])}: {count}"


def _covers(positions: Sequence[int], run: Sequence[Token]) -> bool:
    return positions == [token.position for token in run]


def time_text(visual: Visual, entry: int) -> str:
    """`2.50 s`, when an entry of a clip's time axis is shown; where that is unknown, its number."""
    return f"{entry * visual.seconds:.2f} s" if visual.seconds else f"entry {entry}"


def _text_pieces(run: Sequence[Token], decoder: Decoder, style: Style, document: int) -> Iterator[Piece]:
    start = 0
    for text, special, count in decoder.parts([token.id for token in run]):
        yield Piece(visible(text), style, run[start].position, count, document, special)
        start += count


@define
class Wrapping:
    """Puts pieces into lines."""

    width: float
    """Of a line, in the unit of `measure`."""
    measure: Callable[[str], float]
    _line: list[Piece] = field(factory=list, init=False)
    _used: float = field(default=0.0, init=False)
    _document: int | None = field(default=None, init=False)

    def lines(self, pieces: Iterable[Piece]) -> Iterator[Line]:
        """Yields lines, each with at least one piece. Each document starts on a new line, and line breaks end lines."""
        for piece in pieces:
            if piece.style == "padding" or (self._line and self._line[-1].document != piece.document):
                yield from self._end()
            for part in _at_line_ends(piece):
                for fitting in self._fitting(part):
                    size = self.measure(fitting.text)
                    if self._line and self._used + size > self.width:
                        yield from self._end()
                    self._line.append(fitting)
                    self._used += size
                if part.text.endswith(LINE_END):
                    yield from self._end()
        yield from self._end()

    def _fitting(self, piece: Piece) -> Iterator[Piece]:
        """Yields a piece in parts that a line has room for."""
        text = piece.text
        while self.measure(text) > self.width and len(text) > 1:
            # In proportion to the width: letters of a proportional font may exceed the line a little
            cut = max(1, int(len(text) * self.width / self.measure(text)))
            yield piece._replace(text=text[:cut])
            text = text[cut:]
        yield piece._replace(text=text)

    def _end(self) -> Iterator[Line]:
        if self._line:
            document = self._line[0].document
            yield Line(self._line, document >= 0 and document != self._document)
            self._document = document
        self._line, self._used = [], 0.0


def _at_line_ends(piece: Piece) -> Iterator[Piece]:
    # Spaces in place of tabs, whose drawn width `measure` would not give
    *lines, rest = piece.text.replace("\t", "    ").split("\n")
    yield from (piece._replace(text=line + LINE_END) for line in lines)
    # Text that ends with a line break has no further piece
    if rest:
        yield piece._replace(text=rest)
