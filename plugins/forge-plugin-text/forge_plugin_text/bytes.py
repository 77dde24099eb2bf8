"""Tokenizer `bytes`, without a learned vocabulary."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from forge_core.contracts.components import TokenizerComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8, 256 is end-of-text."""

    vocab_size = 257
    end_of_text = 256

    def encode(self, text: str) -> list[int]:
        """Returns one id for each byte of UTF-8; no text contains end-of-text."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes one by one: there is nothing to gain from a batch."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text; bytes that are not UTF-8 become U+FFFD, and ids that are no byte are dropped.

        These are end-of-text, and what a model draws from a vocabulary that is larger than the tokenizer's.
        """
        return bytes(id_ for id_ in ids if id_ < self.end_of_text).decode("utf-8", "replace")

    def save(self, folder: Path) -> None:
        """Does nothing: there is no state."""

    def fingerprint(self) -> str:
        """Returns a constant: all instances encode alike."""
        return hashlib.sha256(b"forge-plugin-text bytes 1").hexdigest()


@frozen(kw_only=True)
class Bytes(TokenizerComponent):
    """One token a byte of UTF-8, and one for end-of-text: a vocabulary of 257."""

    def build(self, context: BuildContext, documents: Callable[[], Iterable[str]]) -> ByteTokenizer:
        """Reads no documents: there is nothing to learn from them."""
        return ByteTokenizer()

    def load(self, context: BuildContext, folder: Path) -> ByteTokenizer:
        """Reads no file: `save` writes none."""
        return ByteTokenizer()

    def expected_vocab_size(self) -> int:
        """Returns 257, whatever the corpus is."""
        return ByteTokenizer.vocab_size
