"""Files of token ids, described without reading an id."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

from forge_core.contracts.errors import JobError
from forge_plugin_memmap.origins import DocumentOrigins
from forge_plugin_memmap.remote import is_remote, remote_stamp

if TYPE_CHECKING:
    import numpy as np

Stamp = tuple[int, ...]
"""Size of a file, times of the last changes of contents and inode, and number of the inode."""
BLOCK = 1 << 22
"""Numbers read at a time."""


class DocumentEnds(Protocol):
    """Where the documents of a shard end, by an index. Plain data: it is sent to other ranks and to workers."""

    @property
    def path(self) -> str:
        """The index, absolute."""

    def blocks(self) -> Iterator[np.ndarray]:
        """Yields the end of each document, counted in tokens of the shard, as arrays of integers in order.

        Raises:
            JobError: the index is damaged. That ends ascend up to the last token is checked by the caller.
        """


@frozen
class ListedEnds:
    """Ends that lie in a file as plain numbers."""

    path: str
    documents: int
    dtype: str = "<i8"
    offset: int = 0
    """Where they begin, in bytes."""
    may_repeat: bool = False
    """Whether the library that wrote them writes documents without tokens, too. These are left out."""

    def blocks(self) -> Iterator[np.ndarray]:
        """See `DocumentEnds`."""
        import numpy as np

        from forge_plugin_memmap.files import Reader

        reader = Reader()
        dtype = np.dtype(self.dtype)
        last = 0
        for start in range(0, self.documents, BLOCK):
            count = min(BLOCK, self.documents - start)
            ends = reader.read(self.path, dtype, self.offset + start * dtype.itemsize, count)
            yield without_empty(last, ends) if self.may_repeat else ends
            last = int(ends[-1])


def without_empty(last: int, ends: np.ndarray) -> np.ndarray:
    """Returns the ends of documents that have tokens; `last` is the end before the first one."""
    import numpy as np

    return ends[ends != np.concatenate([np.array([last], ends.dtype), ends[:-1]])]


@frozen
class Mask:
    """One byte for each token of a shard: whether it is learned as a label."""

    path: str
    offset: int = 0


class PackedDocuments(Protocol):
    """Documents whose ids do not lie together, and are unpacked into the cache. Plain data, as `DocumentEnds`."""

    @property
    def keys(self) -> tuple[str, ...]:
        """What the documents depend on beside the file: the column, the dtype."""

    @property
    def width(self) -> int:
        """Bytes of an id that every id fits into: 2 or 4."""

    @property
    def is_masked(self) -> bool:
        """Whether `batches` yields masks."""

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
        """Yields documents, some at a time: ids (T,), their ends among these (D,), and masks (T,) or None.

        Raises:
            JobError: the file is damaged.
        """


@frozen
class Shard:
    """A file of token ids."""

    path: str
    """Absolute."""
    dtype: str
    """numpy's name of an id's type, with its byte order: `<u2`."""
    offset: int
    """Where the ids begin, in bytes."""
    tokens: int
    vocab_size: int | None = None
    """Size of the tokenizer's vocabulary, if the file states it; all ids are then known to be smaller."""
    end_of_text: int | None = None
    text_bytes: int = 0
    """UTF-8 bytes that the ids stand for; 0 if unknown."""
    ends: DocumentEnds | None = field(default=None, hash=False)
    """Where its documents end; None: that is searched for, by the end-of-text."""
    mask: Mask | None = None
    """Which tokens are learned; None: all."""
    origins: DocumentOrigins | None = field(default=None, eq=False)
    """Where its documents come from; None: unknown."""
    packed: PackedDocuments | None = field(default=None, hash=False)
    """What `path` holds, if it must be unpacked; `tokens` is 0 until then."""
    origin: Shard | None = None
    """Of an unpacked shard, the one that it was unpacked from."""
    summed: bool = False
    """Whether sums of its blocks are beside it (`forge_kit.data.block_sums`), as a manifest declares."""
    stamps: Mapping[str, Stamp] = field(factory=dict, hash=False)
    """By absolute path: of this file and of those beside it that belong to it, as they were when it was described. On
    a file system of a network each look at a file is a message to a server that all ranks share."""

    @property
    def name(self) -> str:
        """The file that the user has, for messages."""
        return self.origin.path if self.origin else self.path

    def cache_key(self) -> list[Any]:
        """Plain JSON that changes with the ids or the index, which are not read. A shard that moves has another."""
        first, further = self._neighbours()
        stamps = [self.stamps.get(path) for path in first[:2]]
        known = [self.path, self.dtype, self.offset, *stamps, *(self.stamps[path] for path in further)]
        return [*known, *(self.packed.keys if self.packed else ())]

    def content_key(self) -> list[Any]:
        """Plain JSON that differs after the shard was written again, and not after it was moved with its times."""
        if self.origin:
            return self.origin.content_key()
        first, further = self._neighbours()
        # Size and time of the contents alone, as a copy has another inode
        stamps = [self.stamps[path][:2] if path in self.stamps else None for path in [*first, *further]]
        known = [os.path.basename(self.path), self.dtype, self.offset, stamps]
        return [*known, *(self.packed.keys if self.packed else ())]

    def _neighbours(self) -> tuple[list[str], list[str]]:
        """This file, its index and its mask ("": there is none), and then what else belongs to it."""
        first = [self.path, self.ends.path if self.ends else "", self.mask.path if self.mask else ""]
        return first, [path for path in self.stamps if path not in first]


def check_visible(shards: Iterable[Shard]) -> None:
    """Check that this machine has the files that another one described, by one file of each folder.

    Raises:
        JobError: one is missing, or is shorter.
    """
    # One of each folder: every rank does this, and a look at each file would load a shared file system.
    for shard in {os.path.dirname(shard.path): shard for shard in shards}.values():
        size = shard.stamps[shard.path][0]
        try:
            seen = remote_stamp(shard.path)[0] if is_remote(shard.path) else os.stat(shard.path).st_size
        except OSError as error:
            reason = error.strerror or error
            raise JobError(f"{shard.path}: cannot be read on {socket.gethostname()} ({reason})") from error
        if seen < size:
            message = f"{shard.path} has {seen:,} bytes on {socket.gethostname()}, and {size:,} where rank 0 runs"
            raise JobError(f"{message}; all ranks must see the same files")


def stamp_of(status: os.stat_result) -> Stamp:
    """Returns what changes when a file is written again."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
