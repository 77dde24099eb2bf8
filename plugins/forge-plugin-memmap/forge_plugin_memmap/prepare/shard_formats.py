"""Formats in which shards are written: Forge's own, and those of datatrove and Megatron, which these read as theirs.

In each the ids of a shard lie in one file, one document after the other, each with its end-of-text, and a second file
has where documents end. Ids are little-endian, of two bytes where the vocabulary allows, else four.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from forge_core.contracts.errors import ForgeError
from forge_kit.data.token_file import ENDS, HEADER, TOKENS, Header


class ShardFormat(Protocol):
    """The files of a shard."""

    ids: str
    """Suffix of the file of ids."""
    ends: str
    """Suffix of the file with the end of each document as int64, while the shard is being written."""
    index: str
    """Suffix of a further file that a finished shard has; empty: none."""
    offset: int
    """Bytes before the ids."""
    is_summed: bool
    """Whether the sums of blocks lie beside the files, as the dataset `memmap` reads them."""

    def head(self, header: Header) -> bytes:
        """Returns what lies before the ids of a finished shard."""

    def complete(self, stem: str, header: Header) -> list[Path]:
        """Make a shard whose files are written one that the format's readers take; returns its files."""

    def reopen(self, stem: str) -> None:
        """Undo `complete`, if a process died after it, before a state had the shard."""


class Forge:
    """`NAME.bin` with a header, and `NAME.ends`; see `forge_kit.data.token_file`."""

    ids, ends, index, offset, is_summed = TOKENS, ENDS, "", HEADER.size, True

    def head(self, header: Header) -> bytes:
        return header.pack()

    def complete(self, stem: str, header: Header) -> list[Path]:
        return [Path(stem + self.ids), Path(stem + self.ends)]

    def reopen(self, stem: str) -> None:
        """The header is written again."""


class Datatrove:
    """`NAME.ds`, `NAME.ds.index` and `NAME.ds.metadata`, as `TokenizedFile` of datatrove 0.10 writes them."""

    # The index is the ends of documents: uint64, where ours are int64, and so the same bytes
    ids, ends, index, offset, is_summed = ".ds", ".ds.index", ".ds.metadata", 0, False

    def head(self, header: Header) -> bytes:
        return b""

    def complete(self, stem: str, header: Header) -> list[Path]:
        # Tokenizer and bytes of an id; tokens; tokens for people. Tokenizers of Forge need have no name
        text = f"Unknown Tokenizer|{header.width}\n{header.tokens}\n{header.tokens:,} T"
        _write(Path(stem + self.index), text.encode())
        return [Path(stem + self.ids), Path(stem + self.ends), Path(stem + self.index)]

    def reopen(self, stem: str) -> None:
        """The metadata is written again."""


class Megatron:
    """`NAME.bin` and `NAME.idx`, as `IndexedDatasetBuilder` of Megatron-LM writes them: a document is a sequence."""

    ids, ends, index, offset, is_summed = ".bin", ".ends", ".idx", 0, False
    MAGIC: ClassVar = b"MMIDIDX\x00\x00"
    HEAD: ClassVar = struct.Struct("<9sQBQQ")
    """Magic, version, code of the type, number of sequences, number of bounds of documents."""
    CODES: ClassVar = {2: 8, 4: 4}
    """Megatron's numbers of uint16 and int32, by width; ids of four bytes are below 2^31."""

    def head(self, header: Header) -> bytes:
        return b""

    def complete(self, stem: str, header: Header) -> list[Path]:
        ends = np.fromfile(stem + self.ends, "<i8")
        lengths = np.diff(ends, prepend=0)
        if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
            raise ForgeError(f"{stem}{self.ids}: a document has {lengths.max()} tokens; Megatron has at most 2^31 - 1")
        count = len(ends)
        parts = [
            self.HEAD.pack(self.MAGIC, 1, self.CODES[header.width], count, count + 1),
            lengths.astype("<i4").tobytes(),
            ((ends - lengths) * header.width).astype("<i8").tobytes(),
            np.arange(count + 1, dtype="<i8").tobytes(),
        ]
        _write(Path(stem + self.index), b"".join(parts))
        # Only when the whole index is on the disk: one of both always has the ends
        os.unlink(stem + self.ends)
        return [Path(stem + self.ids), Path(stem + self.index)]

    def reopen(self, stem: str) -> None:
        path = Path(stem + self.index)
        data = path.read_bytes() if path.exists() else b""
        count = self.HEAD.unpack_from(data)[3] if len(data) >= self.HEAD.size else 0
        # A part of an index was being written by the process that died, and the ends are there still
        if count and len(data) == self.HEAD.size + 20 * count + 8:
            lengths = np.frombuffer(data, "<i4", count, self.HEAD.size)
            _write(Path(stem + self.ends), np.cumsum(lengths, dtype="<i8").tobytes())
        path.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


FORMATS: dict[str, ShardFormat] = {"forge": Forge(), "datatrove": Datatrove(), "megatron": Megatron()}
"""By the values of `--format`."""
