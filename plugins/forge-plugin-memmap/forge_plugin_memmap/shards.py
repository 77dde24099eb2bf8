"""Files of token ids, described by their name, header and size; no id is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from attrs import frozen

from forge_core.contracts.errors import JobError

SUFFIXES = (".bin", ".npy")
NPY_MAGIC = b"\x93NUMPY"
ENDS, LEARNED = ".ends", ".learned"
"""Suffixes, in place of a shard's own, of its document index and of its mask (see `forge_kit.token_file`)."""


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
    """Documents, where the file says so."""

    def beside(self, suffix: str) -> str:
        """The file that belongs to this one, whether or not it exists."""
        return os.path.splitext(self.path)[0] + suffix

    @property
    def documents(self) -> int | None:
        """How many documents the index beside the file lists; None: there is no index."""
        path = self.beside(ENDS)
        return os.path.getsize(path) // 8 if os.path.exists(path) else None

    @property
    def mask(self) -> bool:
        """Whether a file beside this one says which tokens are learned."""
        return os.path.exists(self.beside(LEARNED))

    def cache_key(self) -> list[Any]:
        """Plain JSON that changes with the ids or the index, which are not read. A shard that moves has another."""
        return [self.path, self.dtype, self.offset, _stamp(self.path), _stamp(self.beside(ENDS))]

    def content_key(self) -> list[Any]:
        """Plain JSON that differs after the shard was written again, and not after it was moved with its times."""
        files = (self.path, self.beside(ENDS), self.beside(LEARNED))
        stamps = [stamp and stamp[:2] for stamp in map(_stamp, files)]
        return [os.path.basename(self.path), self.dtype, self.offset, stamps]


def read_shard(path: str, dtype: str | None = None) -> Shard:
    """Returns the shard in a file.

    Args:
        path: the file.
        dtype: NumPy's name of the type of the ids of a raw file; None if the file states its own format.

    Raises:
        JobError: it cannot be read, is not of the format, has no tokens, or its size does not fit.
    """
    try:
        with open(path, "rb") as file:
            magic = file.read(8)
        if not magic:
            raise JobError(f"{path} has no tokens; {_HOW_MORE}")
        shard = _raw(path, magic, dtype) if dtype else _by_name(path, magic)
    except OSError as error:
        raise JobError(f"{path}: cannot be read ({error.strerror})") from error
    if not shard.tokens:
        raise JobError(f"{path} has no tokens; {_HOW_MORE}")
    _check_neighbours(shard)
    return shard


def _by_name(path: str, magic: bytes) -> Shard:
    suffix = os.path.splitext(path)[1]
    if suffix == ".npy":
        return _npy(path)
    if suffix == ".bin":
        return _token_file(path, magic)
    raise JobError(f"{path}: the name tells no format ({', '.join(SUFFIXES)}); {_HOW_RAW}")


def _token_file(path: str, magic: bytes) -> Shard:
    from forge_kit.token_file import HEADER, MAGIC, read_header

    if magic != MAGIC:
        raise JobError(f"{path}: has no header of a token file, so the type of its ids is not known; {_HOW_RAW}")
    header = read_header(Path(path).with_suffix(""))
    facts = header.vocab_size, header.end_of_text, header.text_bytes, header.documents
    return Shard(os.path.abspath(path), header.dtype.str, HEADER.size, header.tokens, *facts)


def _npy(path: str) -> Shard:
    shape, dtype, offset = _npy_header(path)
    if dtype.kind not in "iu" or len(shape) != 1:
        raise JobError(f"{path}: an array of {dtype} with shape {shape}; ids are integers in one dimension")
    expected, size = offset + shape[0] * dtype.itemsize, os.path.getsize(path)
    if size != expected:
        raise JobError(f"{path} has {size} bytes, its header says {expected} ({shape[0]} ids): it is damaged")
    return Shard(os.path.abspath(path), dtype.str, offset, shape[0])


def _npy_header(path: str) -> tuple[tuple[int, ...], Any, int]:
    """Shape, dtype, and where the data begins."""
    from numpy.lib import format as npy

    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    with open(path, "rb") as file:
        try:
            shape, _, dtype = readers[npy.read_magic(file)](file)
        except (ValueError, KeyError) as error:
            raise JobError(f"{path}: not an array of numpy ({error}); write it with numpy.save") from error
        return shape, dtype, file.tell()


def _raw(path: str, magic: bytes, dtype: str) -> Shard:
    import numpy as np

    from forge_kit.token_file import MAGIC

    if magic == MAGIC or magic.startswith(NPY_MAGIC):
        kind = "a token file of Forge" if magic == MAGIC else "an array of numpy"
        raise JobError(f'{path}: is {kind}, which says itself what it holds; leave out format = "raw" and dtype')
    little, size = np.dtype(dtype).newbyteorder("<"), os.path.getsize(path)
    if size % little.itemsize:
        raise JobError(f"{path} has {size} bytes, which {dtype} ids of {little.itemsize} bytes do not divide")
    return Shard(os.path.abspath(path), little.str, 0, size // little.itemsize)


def _check_neighbours(shard: Shard) -> None:
    """The sizes of the index and of the mask, where they exist."""
    for suffix, unit, entries in ((ENDS, 8, shard.counted), (LEARNED, 1, shard.tokens)):
        path = shard.beside(suffix)
        size = os.path.getsize(path) if os.path.exists(path) else None
        if size is not None and (size % unit or size == 0 or entries not in (None, size // unit)):
            what = "tokens" if suffix == LEARNED else "documents"
            count = "its" if entries is None else entries
            raise JobError(f"{path} has {size} bytes; it must have {unit} for each of {count} {what}")


def _stamp(path: str) -> list[int] | None:
    if not os.path.exists(path):
        return None
    stat = os.stat(path)
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


_HOW_MORE = "leave it out, or provide its data"
_HOW_RAW = 'if it holds plain ids, write format = "raw" and their type, for example dtype = "uint16"'
