"""Text of tokens as they are made: pieces that together are what the tokenizer decodes from all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_plugin_generate.stops import Stops

UNREADABLE = "\ufffd"
"""What decoders write for bytes that are not UTF-8, which the beginning of a longer character is not either."""


class TextStream:
    """Writes the text of one row of tokens, piece by piece.

    A character may have several tokens, so what ends in bytes that are no character yet waits for the next token.
    Decoders treat the first token of a text in their own way, so a piece is what its tokens add to the text of the
    piece before: a token costs the same however long the text is. `finish` compares with the text decoded as a whole.

    A text that may be the beginning of a stop waits too.

    Args:
        stops: where the text ends, with the tokenizer of the model.
        write: receives each piece.
    """

    def __init__(self, stops: Stops, write: Callable[[str], object]) -> None:
        self._stops, self._tokenizer, self._write = stops, stops.tokenizer, write
        self._pieces: list[str] = []
        self._held = ""
        """Text that follows the pieces, and may be the beginning of a stop."""
        self._context = 0
        """Where the last piece begins, whose tokens are decoded again together with the next piece."""
        self._decoded = 0
        """How many tokens have been written."""

    @property
    def text(self) -> str:
        """All that was written."""
        return "".join(self._pieces)

    def show(self, ids: Sequence[int]) -> bool:
        """Write the part of the text that is certain, given all tokens of the row so far.

        Returns whether the row ends with them, as `until` of `generate`.
        """
        # Decoded again and not kept: the context begins at another token after each piece
        before = self._tokenizer.decode(ids[self._context : self._decoded])
        text = self._tokenizer.decode(ids[self._context :])
        if len(text) > len(before) and text.startswith(before) and not text.endswith(UNREADABLE):
            self._hold(text[len(before) :])
            self._context, self._decoded = self._decoded, len(ids)
        return self._stops.reached(ids)

    def finish(self, ids: Sequence[int]) -> None:
        """Write the rest, now that the row is complete."""
        text, written = self._stops.decode(ids), self.text
        if not text.startswith(written):  # a decoder that changes what came before: the whole text once more
            self._write("\n")
            self._pieces, written = [], ""
        if len(text) > len(written):
            self._put(text[len(written) :])

    def _hold(self, piece: str) -> None:
        text = self._held + piece
        certain = self._stops.certain(self._stops.before(text))
        self._held = text[len(certain) :]
        if certain:
            self._put(certain)

    def _put(self, piece: str) -> None:
        self._pieces.append(piece)
        self._write(piece)
