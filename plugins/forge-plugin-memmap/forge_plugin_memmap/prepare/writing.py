"""Shards: token files that are cut where a document fills them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from attrs import asdict, define, field

from forge_core.checkpoint.storage import sync
from forge_core.contracts.errors import ForgeError
from forge_kit.data.block_sums import BLOCK, sums_of, write_sums
from forge_kit.data.cache import file_digest
from forge_kit.data.token_file import Header
from forge_plugin_memmap.origins import ORIGINS
from forge_plugin_memmap.prepare.encoding import Block, id_dtype
from forge_plugin_memmap.prepare.origin_files import ROWS, TEXTS, OriginWriter, bytes_of_texts, row_type
from forge_plugin_memmap.prepare.shard_formats import FORMATS, ShardFormat


@define
class Counts:
    """Counts of a shard or a split."""

    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    """UTF-8 bytes of the texts."""

    def add(self, other: Counts) -> None:
        """Adds the counts of another, in place."""
        self.tokens += other.tokens
        self.documents += other.documents
        self.bytes += other.bytes

    @classmethod
    def of(cls, block: Block) -> Counts:
        """Counts a block; a document counts where it ends."""
        return cls(len(block.ids), len(block.ends), int(block.sizes.sum()))


@define
class Written:
    """The state of a split, from which writing resumes."""

    shards: list[str] = field(factory=list)
    """Names of the shards that are whole."""
    files: dict[str, dict[str, Any]] = field(factory=dict)
    """Size and SHA-256 of their files, and the bytes of each block of which the sums are beside them."""
    kept: dict[str, int] = field(factory=dict)
    """Documents of whole shards that have each field which is kept."""
    total: Counts = field(factory=Counts)
    """Counts of the whole shards."""
    open: Counts = field(factory=Counts)
    """State of the shard that is being written."""

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> Written:
        """The inverse of `plain`."""
        return cls(
            plain["shards"], plain["files"], plain.get("kept", {}), Counts(**plain["total"]), Counts(**plain["open"])
        )

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


TEXT_BYTES = ".bytes"
"""Suffix of a file beside the ids of a part: UTF-8 bytes of all texts up to the end of each document, int64."""


class SplitWriter:
    """Writes the shards `{split}-00000.bin`, …, of one split, each with its `.ends` and `.origins`.

    A shard ends with the document that fills it: it has `shard_tokens` tokens, or a few more. It has no header until
    it is whole.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        vocab_size: int,
        end_of_text: int,
        shard_tokens: int,
        written: Written,
        origins: OriginWriter,
        format: ShardFormat = FORMATS["forge"],
        is_part: bool = False,
    ) -> None:
        """Continues after the data that an earlier process has `written` to this folder, and removes later data.

        Args:
            folder: where the shards are written.
            split: how their names begin.
            vocab_size: ids lie below it; it decides on their width.
            end_of_text: id that ends a document.
            shard_tokens: tokens after which a shard ends.
            written: the state to continue from.
            origins: makes the files with where documents come from.
            format: of the files.
            is_part: whether a join will read them: with `TEXT_BYTES`, and origins as they are written.

        Raises:
            ForgeError: a file is missing, or shorter than it was.
        """
        self.written = written
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._vocab_size, self._end_of_text = vocab_size, end_of_text
        self._dtype = np.dtype(id_dtype(vocab_size))
        self._format, self._origins, self._is_part = format, origins, is_part
        more = [TEXT_BYTES] if is_part else []
        self._suffixes = (format.ids, format.ends, *more, ROWS, TEXTS)
        self._files: dict[str, BinaryIO] = {}
        """The files of the shard that is being written, by suffix."""
        # A process that was killed may have begun shards of which no state was saved
        self._remove_later()
        if written.open.tokens:
            sizes = dict.fromkeys(self._suffixes, written.open.documents * 8)
            sizes[format.ids] = format.offset + written.open.tokens * self._dtype.itemsize
            fields = len(origins.fields)
            sizes[ROWS] = written.open.documents * row_type(fields).itemsize
            del sizes[TEXTS]
            format.reopen(str(self._path("")))
            self._files = {suffix: _continued(self._path(suffix), size) for suffix, size in sizes.items()}
            # After the rows, which have its size
            size = bytes_of_texts(self._path(ROWS), written.open.documents, fields)
            self._files[TEXTS] = _continued(self._path(TEXTS), size)

    def add(self, block: Block) -> None:
        """Append documents."""
        while True:
            missing = self._shard_tokens - self.written.open.tokens
            # The first document that ends at or after the limit: it fills the shard.
            last = int(np.searchsorted(block.ends, missing))
            if last == len(block.ends):
                self._append(block)
                return
            self._append(block.cut(0, last + 1))
            self._finish_shard()
            block = block.cut(last + 1)

    def sync(self) -> None:
        """Put everything that was added on the disk."""
        for file in self._files.values():
            _sync(file)

    def remove_passed(self) -> None:
        """Remove the files from which the `ORIGINS` of whole shards were made; a saved state must have these."""
        if self._is_part:
            return
        passed: list[Path] = []
        # From the last one backwards: those before were removed when it was the last
        for number in reversed(range(len(self.written.shards))):
            # The texts go last, and show whether both did
            paths = [self._path(suffix, number) for suffix in (TEXTS, ROWS)]
            if not paths[0].exists():
                break
            passed += paths
        # From the first one on, so that a process that is killed leaves none before one that is gone
        for path in reversed(passed):
            path.unlink(missing_ok=True)

    def finish(self) -> None:
        """Complete the last shard."""
        if self._files:
            self._finish_shard()

    def close(self) -> None:
        """Close the files, as they are."""
        for file in self._files.values():
            file.close()

    def _append(self, block: Block) -> None:
        if not len(block.ids):
            return
        if not self._files:
            self._files = {suffix: self._path(suffix).open("wb") for suffix in self._suffixes}
            # Room for the header; until then it is zeros, which no reader takes for one
            self._files[self._format.ids].write(bytes(self._format.offset))
        # Before the counts are updated, as ends and bytes are counted from the start of the shard
        before = self.written.open
        # Its own memory, without a copy: of all that is written, these are the most
        self._files[self._format.ids].write(np.ascontiguousarray(block.ids).data)
        self._files[self._format.ends].write((block.ends + before.tokens).astype("<i8").tobytes())
        if TEXT_BYTES in self._files:
            self._files[TEXT_BYTES].write((np.cumsum(block.sizes[:-1]) + before.bytes).astype("<i8").tobytes())
        self._files[ROWS].write(block.origins.rows(self._files[TEXTS].tell()).tobytes())
        self._files[TEXTS].write(np.ascontiguousarray(block.origins.texts).data)
        before.add(Counts.of(block))

    def _finish_shard(self) -> None:
        counts = self.written.open
        sizes = counts.tokens, counts.documents, counts.bytes, self._vocab_size, self._end_of_text
        header = Header(self._dtype.itemsize, *sizes)
        # Last, so that a shard that is being written cannot be taken for a whole one.
        self._files[self._format.ids].seek(0)
        self._files[self._format.ids].write(self._format.head(header))
        self.sync()
        self.close()
        self._files = {}
        own = self._format.complete(str(self._path("")), header)
        if self._is_part:
            paths = [*own, *(self._path(suffix) for suffix in self._suffixes[2:])]
        else:
            paths = [*own, self._path(ORIGINS)]
            counts_of = self._origins.write(paths[-1], self._path(ROWS), self._path(TEXTS))
            self.written.kept = {name: self.written.kept.get(name, 0) + n for name, n in counts_of.items()}
        self.written.files |= self._facts(paths, own if self._format.is_summed else [])
        self.written.shards.append(paths[0].name)
        self.written.total.add(counts)
        self.written.open = Counts()

    def _facts(self, paths: Sequence[Path], summed: Sequence[Path]) -> dict[str, dict[str, Any]]:
        """Returns size and SHA-256 of finished files by name, and writes the sums of blocks of some."""
        # Threads, as both release Python's lock: all that is encoded meanwhile waits for this
        with ThreadPoolExecutor(2) as pool:
            digests = [pool.submit(file_digest, path) for path in paths]
            # On the disk before a state lists them
            for path in summed:
                sync(write_sums(path))
            facts = {}
            for path, digest in zip(paths, digests, strict=True):
                more = {"sums_of": BLOCK} if path in summed else {}
                facts[path.name] = {"size": path.stat().st_size, "sha256": digest.result(), **more}
            return facts

    def _path(self, suffix: str, number: int | None = None) -> Path:
        """A file of the shard of this number; by default, of the one that is being written."""
        number = len(self.written.shards) if number is None else number
        return self._folder / f"{self._split}-{number:05}{suffix}"

    def _remove_later(self) -> None:
        number = len(self.written.shards) + bool(self.written.open.tokens)
        suffixes = [*self._suffixes, *filter(None, [self._format.index, "" if self._is_part else ORIGINS])]
        while any(self._path(suffix, number).exists() for suffix in suffixes):
            for suffix in suffixes:
                self._path(suffix, number).unlink(missing_ok=True)
                sums_of(self._path(suffix, number)).unlink(missing_ok=True)
            number += 1


def _continued(path: Path, size: int) -> BinaryIO:
    """Opens a file to continue writing after its first `size` bytes."""
    actual = path.stat().st_size if path.exists() else None
    if actual is None or actual < size:
        fault = "is missing" if actual is None else f"has {actual} bytes"
        raise ForgeError(f"{path} {fault}, but {size} were written; remove the folder and start again")
    file = path.open("r+b")
    # What was written after the saved state belongs to chunks that are encoded again
    file.truncate(size)
    file.seek(size)
    return file


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
