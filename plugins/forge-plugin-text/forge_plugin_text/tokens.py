"""Token files: every document's ids, one after the other, each ended by end-of-text.

`train.tokens` and `held_out.tokens` are plain little-endian integers, two bytes each where the vocabulary allows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forge_core.errors import ForgeError, JobError
from forge_plugin_text.cache import CachedFolder, Verify, cached_folder, digest_of
from forge_plugin_text.corpus import Corpus
from forge_plugin_text.reading import Document

if TYPE_CHECKING:
    from forge_core.protocols import Tokenizer

logger = logging.getLogger(__name__)

FORMAT = 1
"""Part of the key: raise it when the same inputs give other files."""
TRAIN, HELD_OUT = "train", "held_out"
PIECE_CHARACTERS = 1 << 22
"""A longer document is encoded in pieces of about this size, cut before a line break, to bound memory."""
BATCH_CHARACTERS = 1 << 22
BATCH_PIECES = 1024


class Piece(NamedTuple):
    """What is encoded at once: a document, or part of a very long one."""

    text: str
    held_out: bool
    is_last: bool
    document: str


def cached_tokens(corpus: Corpus, tokenizer: Tokenizer, verify: Verify) -> CachedFolder:
    """The token files of a corpus, from the cache; the tokenizer encodes only if they are not there.

    Raises:
        JobError: the corpus cannot be read, or changes while it is.
    """
    fingerprint = corpus.fingerprint()
    key = digest_of(FORMAT, fingerprint, tokenizer.fingerprint(), tokenizer.vocab_size, tokenizer.end_of_text)

    def make(folder: Path) -> dict[str, Any]:
        logger.info("tokenising %s", corpus)
        info = write_tokens(folder, corpus, tokenizer)
        if corpus.fingerprint() != fingerprint:
            raise JobError(f"{corpus} changed while it was tokenised; start again when nothing writes to it")
        return info

    return cached_folder("tokens", key, make, verify)


def write_tokens(folder: Path, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """Encode a corpus into `folder`. Gives the type of the integers and the counts of both splits."""
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    with TokenWriter(folder, TRAIN, dtype, tokenizer) as train, TokenWriter(folder, HELD_OUT, dtype, tokenizer) as rest:
        for batch in batches(pieces(corpus.documents())):
            for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
                (rest if piece.held_out else train).write(piece, ids)
    return {"dtype": dtype, TRAIN: train.counts(), HELD_OUT: rest.counts()}


def pieces(documents: Iterable[tuple[Document, bool]]) -> Iterator[Piece]:
    """The documents that are not empty, very long ones in pieces."""
    for document, held_out in documents:
        start, length = 0, len(document.text)
        while start < length:
            end = _piece_end(document.text, start)
            yield Piece(document.text[start:end], held_out, end == length, document.name)
            start = end


def _piece_end(text: str, start: int) -> int:
    """Where the piece that starts at `start` ends: before the last line break in reach, else at full size.

    The tokens are those of the whole document, but for the few beside a cut that a tokenizer may join over it.
    """
    limit = start + PIECE_CHARACTERS
    if limit >= len(text):
        return len(text)
    line_break = text.rfind("\n", start + 1, limit)
    return line_break if line_break > 0 else limit


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Groups of pieces, in order, bounded in number and in characters (a single piece may exceed that)."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS or len(batch) == BATCH_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class TokenWriter:
    """Appends the ids of one split to its file, and counts."""

    def __init__(self, folder: Path, split: str, dtype: str, tokenizer: Tokenizer) -> None:
        self._file = token_file(folder, split).open("wb")
        self._dtype, self._tokenizer = dtype, tokenizer
        self._end = np.array([tokenizer.end_of_text], dtype).tobytes()
        self._documents = self._tokens = self._bytes = 0

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def write(self, piece: Piece, ids: Sequence[int]) -> None:
        """Append one piece, and end-of-text if it ends its document.

        Raises:
            ForgeError: the tokenizer gave an id that a text must not have.
        """
        self._file.write(self._checked(piece, ids).astype(self._dtype).tobytes())
        if piece.is_last:
            self._file.write(self._end)
        self._documents += piece.is_last
        self._tokens += len(ids) + piece.is_last
        self._bytes += len(piece.text.encode())

    def counts(self) -> dict[str, int]:
        """Documents, tokens (each end-of-text included), and the UTF-8 bytes that they stand for."""
        return {"documents": self._documents, "tokens": self._tokens, "bytes": self._bytes}

    def _checked(self, piece: Piece, ids: Sequence[int]) -> np.ndarray:
        array = np.asarray(ids, dtype=np.int64)
        vocab_size, end_of_text = self._tokenizer.vocab_size, self._tokenizer.end_of_text
        bad = array[(array < 0) | (array >= vocab_size) | (array == end_of_text)]
        if bad.size:
            raise ForgeError(
                f"the tokenizer encoded {piece.document} with id {bad[0]}; ids of text lie within "
                f"[0, {vocab_size}) and are never {end_of_text}, the end-of-text. This is an error of the tokenizer"
            )
        return array


def token_file(folder: Path, split: str) -> Path:
    """Where the ids of a split lie."""
    return folder / f"{split}.tokens"
