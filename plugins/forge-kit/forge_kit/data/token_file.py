"""Token files: tokenised documents on disk, read through a memory map, so that memory does not grow with their number.

`NAME.bin` is a header of 64 bytes and then the ids of all documents, one after the other, each ended by end-of-text:
little-endian unsigned integers of two bytes where the vocabulary allows, else four. `NAME.ends` beside it holds the end
of each document (int64), and `NAME.learned`, if there, one byte a token: whether it is learned as a label.

T: tokens of a file.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from forge_core.contracts.data import Documents
from forge_core.contracts.errors import ForgeError, JobError
from forge_core.launch.progress_beacon import report_progress
from forge_kit.data.block_sums import BLOCK, SHIFT, CheckedBlocks, checked_map, range_fault, sums_of

MAGIC = b"FORGETOK"
FORMAT = 1
# Padding is explicit, since `<` aligns nothing: integers of 64 bits and ids are then aligned in the map
HEADER = struct.Struct("<8sHH4xQQQQQ8x")
TOKENS, ENDS, LEARNED = ".bin", ".ends", ".learned"
"""Suffixes of the files."""
PIECE = 1 << 22
"""Tokens that are verified at a time."""


class Header(NamedTuple):
    """The header of `NAME.bin`."""

    width: int
    """Bytes of an id: 2 or 4."""
    tokens: int
    documents: int
    text_bytes: int
    """UTF-8 bytes of the texts; 0 if unknown."""
    vocab_size: int
    end_of_text: int

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the ids: unsigned and little-endian, whatever the machine."""
        return np.dtype(f"<u{self.width}")

    def pack(self) -> bytes:
        """Returns the first `HEADER.size` bytes of the file."""
        return HEADER.pack(MAGIC, FORMAT, *self)


class TokenFileWriter:
    """Writes `{stem}.bin` and the files beside it; complete once closed without an exception."""

    def __init__(
        self,
        stem: Path,
        vocab_size: int,
        end_of_text: int,
        learned: bool = False,
        may_contain_end: bool = False,
        resume: Mapping[str, int] | None = None,
    ) -> None:
        """Begin the files, or continue them.

        Args:
            stem: path of the files without their suffixes.
            vocab_size: ids lie below it.
            end_of_text: id that ends a document.
            learned: whether documents say which tokens are learned as labels.
            may_contain_end: whether documents may hold the end-of-text within, as chats do whose turns end with it.
            resume: what `sync` returned; the files lose what was written later.
        """
        self._stem, self._may_contain_end = stem, may_contain_end
        # Ids are below `vocab_size`: 65,536 of them fit into two bytes
        self._width = 2 if vocab_size <= 1 << 16 else 4
        self._vocab_size, self._end_of_text = vocab_size, end_of_text
        counts = resume or {"tokens": 0, "documents": 0, "text_bytes": 0}
        self._tokens, self._text_bytes = counts["tokens"], counts["text_bytes"]
        self._documents = counts["documents"]
        self._new_ends = array("q")
        """Ends of documents that are not yet in their file."""
        bytes_of_ids = HEADER.size + self._width * self._tokens
        self._ids = _continued(_beside(stem, TOKENS), bytes_of_ids if resume else 0)
        self._ends = _continued(_beside(stem, ENDS), 8 * self._documents)
        self._learned = _continued(_beside(stem, LEARNED), self._tokens) if learned else None
        if not resume:
            # Zeros, so that a file that is not finished is not a token file
            self._ids.write(bytes(HEADER.size))

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        if kind is None:
            self._write_ends()
            # Last, so that a file without its header is one that was not finished.
            self._ids.seek(0)
            self._ids.write(self.header().pack())
        for file in self._files():
            file.close()

    def sync(self) -> dict[str, int]:
        """Make durable what was added so far, after a whole document or a part of one.

        Returns:
            The position from which another writer continues (`resume`), as plain JSON.
        """
        self._write_ends()
        for file in self._files():
            file.flush()
            os.fsync(file.fileno())
        return {"tokens": self._tokens, "documents": self._documents, "text_bytes": self._text_bytes}

    def _files(self) -> list[BinaryIO]:
        return [file for file in (self._ids, self._ends, self._learned) if file is not None]

    def _write_ends(self) -> None:
        self._ends.write(np.asarray(self._new_ends, "<i8").tobytes())
        self._new_ends = array("q")

    def header(self) -> Header:
        """The counts so far."""
        counts = self._tokens, self._documents, self._text_bytes
        return Header(self._width, *counts, self._vocab_size, self._end_of_text)

    def add(
        self,
        name: str,
        ids: Sequence[int] | np.ndarray,
        *,
        text_bytes: int = 0,
        learned: np.ndarray | None = None,
        is_last: bool = True,
    ) -> None:
        """Append a document, or a part of one, without end-of-text, which is added after the last part.

        Args:
            name: of the document, for errors.
            ids: token ids.
            text_bytes: UTF-8 bytes that the ids stand for.
            learned: (len(ids),) which ids are learned as labels, where the file records this; None: all. The
                end-of-text is learned if the id before it is.
            is_last: whether the document ends here.

        Raises:
            ForgeError: an id is none of the vocabulary, or is end-of-text.
        """
        checked = self._checked(name, ids)
        if is_last:
            # After the check, which refuses an end-of-text within a document
            checked = np.append(checked, self._end_of_text)
        self._ids.write(checked.astype(f"<u{self._width}").tobytes())
        if self._learned is not None:
            mask = np.ones(len(ids), dtype=bool) if learned is None else np.asarray(learned, dtype=bool)
            # By a slice, as a document without tokens has no last one
            self._learned.write((np.append(mask, mask[-1:].any()) if is_last else mask).tobytes())
        self._tokens += len(checked)
        self._text_bytes += text_bytes
        if is_last:
            self._documents += 1
            self._new_ends.append(self._tokens)
        report_progress()  # other ranks wait for this one

    def _checked(self, name: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        checked = np.asarray(ids, dtype=np.int64)
        ends = (checked == self._end_of_text) & (not self._may_contain_end)
        bad = checked[(checked < 0) | (checked >= self._vocab_size) | ends]
        if bad.size:
            raise ForgeError(
                f"the tokenizer encoded {name} with id {bad[0]}; ids of text lie within [0, {self._vocab_size}) and "
                f"are never {self._end_of_text}, the end-of-text. This is an error of the tokenizer"
            )
        return checked


class TokenFile:
    """The documents of `{stem}.bin`; see `forge_core.contracts.data.Documents`. A pickled copy maps the file itself."""

    def __init__(self, stem: Path, held_out: Documents | None = None, identity: str = "") -> None:
        """Map the files.

        Args:
            stem: path of the files without their suffixes.
            held_out: documents that are held out.
            identity: see `HasIdentity`; empty: unknown.

        Raises:
            JobError: the file is not one, or is damaged.
        """
        self._stem, self._identity = stem, identity
        self.held_out: Documents | None = held_out
        self.header = read_header(stem)
        content = map_array(_beside(stem, TOKENS), "u1", HEADER.size + self.header.tokens * self.header.width)
        # A view, and not a second map, because the sums are of blocks of the whole file
        self._ids = content[HEADER.size :].view(self.header.dtype)
        self._ends = map_array(_beside(stem, ENDS), "<i8", self.header.documents)
        has_mask = _beside(stem, LEARNED).exists()
        self._learned = map_array(_beside(stem, LEARNED), "?", self.header.tokens) if has_mask else None
        self.end_of_text = self.header.end_of_text
        maps = {TOKENS: content, ENDS: self._ends, LEARNED: self._learned}
        self._checked = {suffix: _checked(stem, suffix, data) for suffix, data in maps.items()}
        ranges = CheckedBlocks(self.header.tokens * self.header.width, self._range_fault)
        self._checked_ids = self._checked[TOKENS] or ranges
        # As attributes of this object, which `tokens` reads for each sample
        self._seen, self._width = self._checked_ids.checked, self.header.width
        self._first_byte = HEADER.size if self._checked[TOKENS] else 0
        """Where the ids begin in what `_checked_ids` checks."""

    @property
    def bytes_per_token(self) -> float | None:
        """By the counts in the header; None if the bytes of the texts are unknown."""
        return self.header.text_bytes / self.header.tokens if self.header.text_bytes else None

    def __len__(self) -> int:
        return self.header.tokens

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Checks blocks that this process reads for the first time; raises `DataError` if one is damaged."""
        ids = self._ids[start:stop]
        if not self._checked_ids.is_complete:
            size, begin = ids.nbytes, self._first_byte + start * self._width
            # Without a call where both blocks that it lies in were checked, as it is for nearly all readings
            if size > BLOCK or not size or not (self._seen[begin >> SHIFT] and self._seen[(begin + size - 1) >> SHIFT]):
                self._checked_ids.demand(begin, begin + size)
        # A copy in any case: the map is read-only
        return ids.astype(np.int64)

    def learned(self, start: int, stop: int) -> np.ndarray | None:
        """None if there is no file with a mask. Raises `DataError` if a block that is read is damaged."""
        if self._learned is None:
            return None
        if (checked := self._checked[LEARNED]) is not None:
            checked.demand(start, min(stop, len(self)))
        return np.array(self._learned[start:stop])

    def ends(self) -> np.ndarray:
        """Returns the map itself, which must not be changed. Raises `DataError` if a block of it is damaged."""
        if (checked := self._checked[ENDS]) is not None:
            checked.demand(0, 8 * self.header.documents)
        return self._ends

    def verify(self) -> None:
        """See `forge_kit.data.budgets.Verifiable`."""
        self.ends()
        for start in range(0, len(self), PIECE):
            report_progress(f"verifying {_beside(self._stem, TOKENS)}", start, len(self))
            # The results are discarded: blocks are checked when they are read
            self.tokens(start, start + PIECE)
            self.learned(start, start + PIECE)

    def _range_fault(self, number: int) -> str:
        # Of a file without sums at least that: the embedding would end with an index out of range
        first, last = (place * BLOCK // self.header.width for place in (number, number + 1))
        return range_fault(_beside(self._stem, TOKENS), self._ids[first:last], first, self.header.vocab_size)

    def where(self, start: int, stop: int) -> str:
        """Names the file with its positions, which count end-of-text too."""
        return f"tokens {start} to {stop} of {_beside(self._stem, TOKENS)}"

    def identity(self) -> str:
        """As the maker of the file has given it; the contents are not read for it."""
        return self._identity

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFile, (self._stem, self.held_out, self._identity)


def _checked(stem: Path, suffix: str, data: np.ndarray | None) -> CheckedBlocks | None:
    """The blocks of a file that has sums; `data` is its map."""
    path = _beside(stem, suffix)
    if data is None or not sums_of(path).exists():
        return None
    return checked_map(path, data.view(np.uint8))


def read_header(stem: Path) -> Header:
    """Returns the header of `{stem}.bin`.

    Raises:
        JobError: the file is missing, is not a token file of Forge, or its size does not match its header.
    """
    path = _beside(stem, TOKENS)
    try:
        with path.open("rb") as file:
            data, size = file.read(HEADER.size), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise JobError(f"{path}: cannot be read ({error.strerror})") from error
    return parse_header(path, data, size)


def parse_header(path: str | Path, data: bytes, size: int) -> Header:
    """Returns the header that a file's first `HEADER.size` bytes are.

    Args:
        path: the file, for messages.
        data: its first bytes.
        size: its size in bytes.

    Raises:
        JobError: it is not a token file, or its size does not match its header.
    """
    if data[: len(MAGIC)] != MAGIC or len(data) < HEADER.size:
        raise JobError(f"{path}: not a token file of Forge (it does not begin with {MAGIC.decode()})")
    _, version, *values = HEADER.unpack(data)
    header = Header(*values)
    if version != FORMAT or header.width not in (2, 4):
        raise JobError(f"{path}: format {version} with ids of {header.width} bytes; this version reads format {FORMAT}")
    expected = HEADER.size + header.tokens * header.width
    if size != expected:
        raise JobError(
            f"{path} has {size} bytes, but its header implies {expected} ({header.tokens} tokens): it is damaged"
        )
    return header


def map_array(path: Path, dtype: str, length: int) -> np.ndarray:
    """Returns a memory map of a file of `length` numbers.

    Raises:
        JobError: it is missing or has another size.
    """
    expected = length * np.dtype(dtype).itemsize
    size = path.stat().st_size if path.is_file() else None
    if size != expected:
        problem = "is missing" if size is None else f"has {size} bytes"
        raise JobError(f"{path} {problem}, expected {expected} for {length} entries: it is damaged")
    # As a plain array, whose slices are made faster than slices of a memmap
    return np.memmap(path, dtype, mode="r").view(np.ndarray) if length else np.empty(0, dtype)


def _continued(path: Path, size: int) -> BinaryIO:
    """Opens a file for writing from byte `size` on; the bytes before are kept."""
    file = path.open("r+b" if size else "wb")
    file.truncate(size)
    file.seek(size)
    return file


def _beside(stem: Path, suffix: str) -> Path:
    return stem.with_name(stem.name + suffix)
