"""Files of token ids, described by their name, header and size; no id is read."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable, Mapping
from typing import IO, Any

from attrs import evolve, field, frozen

from forge_core.contracts.errors import JobError
from forge_kit.data.data_files import Listing

SUFFIXES = (".bin", ".npy")
NPY_MAGIC = b"\x93NUMPY"
ENDS, LEARNED = ".ends", ".learned"
"""Suffixes, in place of a shard's own, of its document index and of its mask (see `forge_kit.data.token_file`)."""


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
    counted: int | None = None
    """Number of documents, if the file states it."""
    summed: bool = False
    """Whether its folder's manifest declares that sums of its blocks are beside it (`forge_kit.data.block_sums`)."""
    stamps: Mapping[str, tuple[int, ...]] = field(factory=dict, hash=False)
    """By suffix ("" for the shard's own), size, times of the last changes of contents and inode, and number of the
    inode: of this file and of those beside it that exist, as they were when it was described. On a file system of a
    network each look at a file is a message to a server that all ranks share."""

    def beside(self, suffix: str) -> str:
        """The file that belongs to this one, whether or not it exists."""
        return os.path.splitext(self.path)[0] + suffix

    @property
    def documents(self) -> int | None:
        """How many documents the index beside the file lists; None: there is no index."""
        return self.stamps[ENDS][0] // 8 if ENDS in self.stamps else None

    @property
    def mask(self) -> bool:
        """Whether a file beside this one marks the tokens that are learned."""
        return LEARNED in self.stamps

    @property
    def sizes(self) -> Mapping[str, int]:
        """The bytes of this file and of those beside it, by their names without folder."""
        stem, own = os.path.splitext(os.path.basename(self.path))
        return {stem + (suffix or own): stamp[0] for suffix, stamp in self.stamps.items()}

    def cache_key(self) -> list[Any]:
        """Plain JSON that changes with the ids or the index, which are not read. A shard that moves has another."""
        return [self.path, self.dtype, self.offset, self.stamps[""], self.stamps.get(ENDS)]

    def content_key(self) -> list[Any]:
        """Plain JSON that differs after the shard was written again, and not after it was moved with its times."""
        # Size and time of the contents alone, as a copy has another inode
        stamps = [self.stamps[suffix][:2] if suffix in self.stamps else None for suffix in ("", ENDS, LEARNED)]
        return [os.path.basename(self.path), self.dtype, self.offset, stamps]


def read_shard(path: str, dtype: str | None = None, listing: Listing | None = None) -> Shard:
    """Returns the shard in a file, which is opened once.

    Args:
        path: the file.
        dtype: NumPy's name of the type of the ids of a raw file; None if the file states its own format.
        listing: the listing of its folder; by default, one is made.

    Raises:
        JobError: it cannot be read, is not of the format, has no tokens, or its size does not fit.
    """
    try:
        with open(path, "rb") as file:
            # Of the open file and not of the path, which may lead to another file by now
            status = os.fstat(file.fileno())
            # Before the header is read: that it is missing would be the less useful message
            if stat.S_ISREG(status.st_mode) and not status.st_size:
                raise JobError(f"{path} has no tokens; {_HOW_MORE}")
            shard = _raw(path, file, status.st_size, dtype) if dtype else _by_name(path, file, status.st_size)
        beside = _stamps_beside(shard, listing or Listing())
    except OSError as error:
        raise JobError(f"{path}: cannot be read ({error.strerror})") from error
    if not shard.tokens:
        raise JobError(f"{path} has no tokens; {_HOW_MORE}")
    shard = evolve(shard, stamps={"": _stamp(status), **beside})
    _check_neighbours(shard)
    return shard


def check_visible(shards: Iterable[Shard]) -> None:
    """Check that this machine has the files that another one described, by one file of each folder.

    Raises:
        JobError: one is missing, or is shorter.
    """
    # One of each folder: every rank does this, and a look at each file would load a shared file system.
    for shard in {os.path.dirname(shard.path): shard for shard in shards}.values():
        size = shard.stamps[""][0]
        try:
            seen = os.stat(shard.path).st_size
        except OSError as error:
            raise JobError(f"{shard.path}: cannot be read on {socket.gethostname()} ({error.strerror})") from error
        if seen < size:
            message = f"{shard.path} has {seen:,} bytes on {socket.gethostname()}, and {size:,} where rank 0 runs"
            raise JobError(f"{message}; all ranks must see the same files")


def _by_name(path: str, file: IO[bytes], size: int) -> Shard:
    suffix = os.path.splitext(path)[1]
    if suffix == ".npy":
        return _npy(path, file, size)
    if suffix == ".bin":
        return _token_file(path, file, size)
    raise JobError(f"{path}: the name indicates no format ({', '.join(SUFFIXES)}); {_HOW_RAW}")


def _token_file(path: str, file: IO[bytes], size: int) -> Shard:
    from forge_kit.data.token_file import HEADER, MAGIC, parse_header

    data = file.read(HEADER.size)
    if not data.startswith(MAGIC):
        raise JobError(f"{path}: has no header of a token file, so the type of its ids is not known; {_HOW_RAW}")
    header = parse_header(path, data, size)
    facts = header.vocab_size, header.end_of_text, header.text_bytes, header.documents
    return Shard(os.path.abspath(path), header.dtype.str, HEADER.size, header.tokens, *facts)


def _npy(path: str, file: IO[bytes], size: int) -> Shard:
    shape, dtype, offset = _npy_header(path, file)
    if dtype.kind not in "iu" or len(shape) != 1:
        raise JobError(f"{path}: an array of {dtype} with shape {shape}; ids are integers in one dimension")
    expected = offset + shape[0] * dtype.itemsize
    if size != expected:
        raise JobError(f"{path} has {size} bytes, but its header implies {expected} ({shape[0]} ids): it is damaged")
    return Shard(os.path.abspath(path), dtype.str, offset, shape[0])


def _npy_header(path: str, file: IO[bytes]) -> tuple[tuple[int, ...], Any, int]:
    """Shape, dtype, and where the data begins."""
    from numpy.lib import format as npy

    # Version 3 is for names of fields in UTF-8, which an array of integers has not.
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        shape, _, dtype = readers[npy.read_magic(file)](file)
    except (ValueError, KeyError) as error:
        message = f"{path}: not an array of numpy ({error}); write it with numpy.save"
        raise JobError(f"{message}; {_HOW_RAW}, as Dolma and OLMo write them under this name") from error
    return shape, dtype, file.tell()


def _raw(path: str, file: IO[bytes], size: int, dtype: str) -> Shard:
    import numpy as np

    from forge_kit.data.token_file import MAGIC

    magic = file.read(8)
    # Read as raw ids, a header would become the first few tokens.
    if magic == MAGIC or magic.startswith(NPY_MAGIC):
        kind = "a token file of Forge" if magic == MAGIC else "an array of numpy"
        raise JobError(f'{path}: is {kind}, which describes its own contents; leave out format = "raw" and dtype')
    # Whatever the machine's order is: files move between machines
    little = np.dtype(dtype).newbyteorder("<")
    if size % little.itemsize:
        raise JobError(f"{path} has {size} bytes, which {dtype} ids of {little.itemsize} bytes do not divide")
    return Shard(os.path.abspath(path), little.str, 0, size // little.itemsize)


def _stamps_beside(shard: Shard, listing: Listing) -> dict[str, tuple[int, ...]]:
    """The index and the mask, where they exist."""
    paths = {suffix: shard.beside(suffix) for suffix in (ENDS, LEARNED)}
    return {suffix: _stamp(os.stat(path)) for suffix, path in paths.items() if listing.has(path)}


def _check_neighbours(shard: Shard) -> None:
    """The sizes of the index and of the mask, where they exist."""
    for suffix, unit, entries in ((ENDS, 8, shard.counted), (LEARNED, 1, shard.tokens)):
        if suffix not in shard.stamps:
            continue
        size = shard.stamps[suffix][0]
        if size % unit or size == 0 or entries not in (None, size // unit):
            what = "tokens" if suffix == LEARNED else "documents"
            count = "its" if entries is None else entries
            path = shard.beside(suffix)
            raise JobError(f"{path} has {size} bytes; it must have {unit} for each of {count} {what}")


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


_HOW_MORE = "leave it out, or provide its data"
_HOW_RAW = 'if it holds plain ids, write format = "raw" and their type, for example dtype = "uint16"'
