"""From items to token ids: what a worker does.

N: ids of a block, D: documents that end in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from forge_core.contracts.data import Tokenizer
from forge_core.contracts.errors import ForgeError, JobError
from forge_plugin_memmap.prepare.documents import PIECE_CHARACTERS, Drop, Dropped, Item, Text, pieces, utf8_size

BATCH_BYTES = 1 << 18
"""Text that a tokenizer is given at a time, about."""
BATCH_TEXTS = 1024


class Block(NamedTuple):
    """Ids of documents in a row. The first may have begun in a block before; the last may go on in the next."""

    ids: np.ndarray
    """(N,) of two or four bytes, each document with its end-of-text."""
    ends: np.ndarray
    """(D,) where documents end."""
    sizes: np.ndarray
    """(D + 1,) bytes of text of each document in this block; the last entry is of the one that goes on, if any."""

    def cut(self, first: int, stop: int | None = None) -> Block:
        """Documents [first, stop) of the block; without `stop` also the one that goes on."""
        begin = int(self.ends[first - 1]) if first else 0
        if stop is None:
            return Block(self.ids[begin:], self.ends[first:] - begin, self.sizes[first:])
        end = int(self.ends[stop - 1]) if stop else 0
        sizes = np.append(self.sizes[first:stop], 0)
        return Block(self.ids[begin:end], self.ends[first:stop] - begin, sizes)


class Encoded(NamedTuple):
    """The encoded documents of a chunk."""

    block: Block
    dropped: Dropped


class Encoder:
    """Encodes chunks with a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, strict: bool) -> None:
        """`strict`: whether anything that yields no document is an error, unless it is empty."""
        self._tokenizer, self._strict = tokenizer, strict
        self._dtype = id_dtype(tokenizer.vocab_size)

    def encode(self, items: Iterable[Item]) -> Encoded:
        """The ids of the documents of a chunk.

        Raises:
            JobError: strict, and something is wrong with the input.
            ForgeError: the tokenizer returned an id that no text has.
        """
        dropped = Dropped()
        ids, ends, sizes = array("q"), array("q"), array("q", [0])
        names: list[str] = []
        for batch in _batches(self._texts(items, dropped)):
            for text, encoded in zip(batch, self._tokenizer.encode_batch([text.text for text in batch]), strict=True):
                ids.fromlist(encoded)
                sizes[-1] += text.size
                if len(names) == len(ends):
                    names.append(text.where)
                if text.is_last:
                    ids.append(self._tokenizer.end_of_text)
                    ends.append(len(ids))
                    sizes.append(0)
        block = Block(*(np.asarray(column, np.int64) for column in (ids, ends, sizes)))
        self._check(block, names)
        return Encoded(block._replace(ids=block.ids.astype(self._dtype)), dropped)

    def _texts(self, items: Iterable[Item], dropped: Dropped) -> Iterator[Text]:
        for item in items:
            for document in item.documents():
                if isinstance(document, Drop):
                    refuse(document, self._strict)
                    dropped.add(document)
                else:
                    yield from _in_pieces(document)

    def _check(self, block: Block, names: Sequence[str]) -> None:
        """Refuse ids that are not in the vocabulary, and text that is encoded with the end-of-text."""
        size, end = self._tokenizer.vocab_size, self._tokenizer.end_of_text
        wrong = (block.ids < 0) | (block.ids >= size) | (block.ids == end)
        wrong[block.ends - 1] = False
        if wrong.any():
            place = int(wrong.argmax())
            name = names[int(np.searchsorted(block.ends, place, side="right"))]
            raise ForgeError(
                f"the tokenizer encoded {name} with id {block.ids[place]}; ids of text lie within [0, {size}) and are "
                f"never {end}, the end-of-text. This is an error of the tokenizer"
            )


def refuse(drop: Drop, strict: bool) -> None:
    """Raises `JobError` for what must not be left out: anything but what is empty, if `strict`."""
    if strict and drop.reason != "empty":
        fix = "correct it, or leave such documents out with --errors skip"
        raise JobError(f"{drop.where}: {drop.reason} ({drop.detail}); {fix}")


def id_dtype(vocab_size: int) -> str:
    """The type of ids in a token file."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def _in_pieces(text: Text) -> Iterator[Text]:
    """A document, in pieces if it is very long."""
    if len(text.text) <= PIECE_CHARACTERS:
        yield text
        return
    for piece, is_last in pieces([text.text]):
        yield Text(text.where, piece, utf8_size(piece), is_last)


def _batches(texts: Iterable[Text]) -> Iterator[list[Text]]:
    """Groups of texts, in order, bounded in number and in size (a single text may exceed that)."""
    batch: list[Text] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += text.size
        if size >= BATCH_BYTES or len(batch) == BATCH_TEXTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
