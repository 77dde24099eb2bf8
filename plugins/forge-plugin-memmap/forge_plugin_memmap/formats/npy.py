"""Format `npy`: arrays of numpy, with their header."""

from __future__ import annotations

import io
from typing import Any

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_plugin_memmap.formats.kind import Candidate, TokenFormat
from forge_plugin_memmap.formats.plain_index import plain_index
from forge_plugin_memmap.shards import Shard

MAGIC = b"\x93NUMPY"


@frozen(kw_only=True)
class Npy(TokenFormat):
    """Arrays of integers in one dimension that `numpy.save` wrote."""

    def suffixes(self) -> tuple[str, ...]:
        """Of `numpy.save`."""
        return (".npy",)

    def recognises(self, file: Candidate) -> bool:
        """By numpy's magic."""
        return file.head.startswith(MAGIC)

    def refusal(self, file: Candidate) -> str:
        """By the name."""
        return "it has no header of numpy" if file.path.endswith(".npy") else ""

    def shard(self, file: Candidate) -> Shard:
        """Raises `JobError` where it is no such array, or its size does not match its header."""
        shape, dtype, offset = _header(file)
        if dtype.kind not in "iu" or len(shape) != 1:
            message = f"{file.path}: an array of {dtype} with shape {shape}"
            raise JobError(f"{message}; ids are integers in one dimension")
        expected = offset + shape[0] * dtype.itemsize
        if file.size != expected:
            message = f"{file.path} has {file.size} bytes, but its header implies {expected} ({shape[0]} ids)"
            raise JobError(f"{message}: it is damaged")
        return Shard(file.absolute, dtype.str, offset, shape[0], **plain_index(file, shape[0]))


def _header(file: Candidate) -> tuple[tuple[int, ...], Any, int]:
    """Shape, dtype, and where the data begins."""
    from numpy.lib import format as npy

    # Version 3 is for names of fields in UTF-8, which an array of integers has not.
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    # The header of an array in one dimension has 128 bytes
    stream = io.BytesIO(file.head)
    try:
        shape, _, dtype = readers[npy.read_magic(stream)](stream)
    except (ValueError, KeyError) as error:
        raise JobError(f"{file.path}: not an array of numpy ({error}); it is damaged") from error
    return shape, dtype, stream.tell()
