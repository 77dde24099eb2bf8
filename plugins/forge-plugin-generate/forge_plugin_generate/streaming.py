"""Text of tokens as they are made: pieces that together are what the tokenizer decodes from all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer

UNREADABLE = "\ufffd"
"""What decoders write for bytes that are not UTF-8, which the beginning of a longer character is not either."""


class TextStream:
    """Writes the text of one row of tokens, piece by piece.

    A character may have several tokens, so what ends in bytes that are no character yet waits for the next token. All
    tokens are decoded each time: decoders treat the first token of a text in their own way, so that pieces decoded by
    themselves would not add up to the text.

    Args:
        tokenizer: the tokenizer of the model.
        write: receives each piece.
    """

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], object]) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._written = ""

    @property
    def text(self) -> str:
        """All that was written."""
        return self._written

    def show(self, ids: Sequence[int]) -> bool:
        """Write what is certain of these tokens, all of the row so far. False, as `until` of `generate` goes on."""
        self._go_on(self._tokenizer.decode(ids).rstrip(UNREADABLE))
        return False

    def finish(self, ids: Sequence[int]) -> None:
        """Write the rest, now that the row is complete."""
        text = self._tokenizer.decode(ids)
        if not text.startswith(self._written):  # a decoder that changes what came before: the whole text once more
            self._write("\n")
            self._written = ""
        self._go_on(text)

    def _go_on(self, text: str) -> None:
        if len(text) > len(self._written) and text.startswith(self._written):
            self._write(text[len(self._written) :])
            self._written = text
