"""The token files of a corpus, kept in the cache: `train` and `held_out` (see `forge_kit.token_file`)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from forge_core.contracts.errors import JobError
from forge_kit.cache import CachedFolder, Verify, cached_folder, digest_of
from forge_kit.token_file import Header, TokenFile, TokenFileWriter
from forge_plugin_text.corpus import Corpus
from forge_plugin_text.reading import Document

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer

logger = logging.getLogger(__name__)

FORMAT = 2
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


def open_documents(stored: CachedFolder, corpus: Corpus) -> TokenFile:
    """The documents of both splits.

    Raises:
        JobError: nothing is held out although the job asks for it.
    """
    held_out = None
    if corpus.split.holds_out_any:
        if not stored.info[HELD_OUT]["tokens"]:
            raise JobError(f"{corpus}: none of the documents to hold out is there or has text; choose others")
        held_out = TokenFile(stored.path / HELD_OUT)
    return TokenFile(stored.path / TRAIN, held_out)


def write_tokens(folder: Path, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """Encode a corpus into `folder`. Gives the counts of both splits."""
    vocabulary = tokenizer.vocab_size, tokenizer.end_of_text
    with TokenFileWriter(folder / TRAIN, *vocabulary) as train, TokenFileWriter(folder / HELD_OUT, *vocabulary) as rest:
        for batch in batches(pieces(corpus.documents())):
            for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
                writer = rest if piece.held_out else train
                writer.add(piece.document, ids, text_bytes=len(piece.text.encode()), is_last=piece.is_last)
    return {TRAIN: _counts(train.header()), HELD_OUT: _counts(rest.header())}


def _counts(header: Header) -> dict[str, int]:
    return {"documents": header.documents, "tokens": header.tokens, "bytes": header.text_bytes}


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
