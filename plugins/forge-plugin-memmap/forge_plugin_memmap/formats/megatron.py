"""Format `megatron`: `.bin` and `.idx` of Megatron-LM and NeMo (`megatron/core/datasets/indexed_dataset.py`).

The index has a head of 34 bytes (magic, version, code of the dtype, numbers of sequences and of entries of documents),
then the length of each sequence (int32), where it begins in bytes (int64), and the number of the first sequence of each
document, with the number of all sequences last (int64). The `.bin` has nothing but ids.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_plugin_memmap.formats.kind import Candidate, TokenFormat, read_part
from forge_plugin_memmap.shards import BLOCK, Shard, without_empty

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
HEAD = struct.Struct("<9sQBQQ")
DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "float64", 7: "float32", 8: "<u2"}
"""Types by their codes in the index."""


@frozen
class MegatronEnds:
    """Where documents end: their first sequences, through the lengths of sequences."""

    path: str
    sequences: int
    documents: int
    width: int
    """Bytes of an id."""

    def blocks(self) -> Iterator[np.ndarray]:
        """Raises `JobError` where sequences do not lie one after the other, or documents do not follow each other."""
        import numpy as np

        # Both tables in step, each in blocks: the index of a large corpus has gigabytes
        firsts = self._firsts()
        rest = next(firsts)
        if rest[0] != 0:
            raise JobError(f"{self.path}: the first document does not begin with sequence 0; it is damaged")
        last = before = 0
        for number, ends in self._sequence_ends():
            # The end before the first sequence of this block, and the ends of its sequences
            known = np.concatenate([[before], ends])
            before = int(ends[-1])
            while len(rest) and rest[0] <= number + len(ends):
                count = int(np.searchsorted(rest > number + len(ends), True))
                # A document ends where the sequence before its successor does: hence no `- 1` with `known`
                places = rest[:count] - number
                if places.min() < 0 or (places[1:] < places[:-1]).any():
                    raise JobError(f"{self.path}: documents do not ascend; it is damaged")
                yield without_empty(last, known[places])
                last = int(known[places[-1]])
                rest = rest[count:] if count < len(rest) else next(firsts, rest[:0])
        if len(rest):
            raise JobError(f"{self.path}: a document has sequences beyond the last one; it is damaged")

    def _firsts(self) -> Iterator[np.ndarray]:
        offset = HEAD.size + 12 * self.sequences
        return _numbers(self.path, "<i8", offset, self.documents + 1)

    def _sequence_ends(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the number of a sequence, and the ends of those from it on, in tokens."""
        import numpy as np

        lengths = _numbers(self.path, "<i4", HEAD.size, self.sequences)
        pointers = _numbers(self.path, "<i8", HEAD.size + 4 * self.sequences, self.sequences)
        number = tokens = 0
        for length, pointer in zip(lengths, pointers, strict=True):
            ends = tokens + np.cumsum(length, dtype=np.int64)
            # Ids of other sequences, or none, would lie between two that are read in a row.
            if (length < 0).any() or not np.array_equal(pointer, (ends - length) * self.width):
                message = f"{self.path}: sequences do not lie one after the other"
                raise JobError(f"{message}; write the file again with Megatron's merge_datasets, or it is damaged")
            yield number, ends
            number += len(ends)
            tokens = int(ends[-1])


def _numbers(path: str, dtype: str, offset: int, count: int) -> Iterator[np.ndarray]:
    import numpy as np

    from forge_plugin_memmap.files import Reader

    reader, kind = Reader(), np.dtype(dtype)
    for start in range(0, count, BLOCK):
        yield reader.read(path, kind, offset + start * kind.itemsize, min(BLOCK, count - start))


@frozen(kw_only=True)
class Megatron(TokenFormat):
    """`NAME.bin` and `NAME.idx` of Megatron-LM and NeMo."""

    has_header = False
    index = (".idx", ".bin")

    def suffixes(self) -> tuple[str, ...]:
        """Of the ids."""
        return (".bin",)

    def recognises(self, file: Candidate) -> bool:
        """By the magic of the index beside it."""
        return file.path.endswith(".bin") and self._head(file).startswith(MAGIC)

    def refusal(self, file: Candidate) -> str:
        """An index that is none."""
        if not file.path.endswith(".bin"):
            return ""
        name = os.path.basename(file.beside(".idx"))
        return f"{name} beside it is not one of Megatron" if self._head(file) else f"{name} is not beside it"

    def shard(self, file: Candidate) -> Shard:
        """Raises `JobError` where the index is damaged, of other data, or its ids are no integers."""
        path = file.beside(".idx")
        head = self._head(file)
        if len(head) < HEAD.size:
            raise JobError(f"{path} has {len(head)} bytes, fewer than its head of {HEAD.size}: it is damaged")
        _, version, code, sequences, entries = HEAD.unpack(head)
        if version != 1:
            raise JobError(f"{path}: version {version} of Megatron's index; version 1 can be read")
        # Floating-point types have codes too, for other uses of the format
        dtype = DTYPES.get(code, f"unknown (code {code})")
        if dtype[-2] not in "iu":
            raise JobError(f"{path}: the type of ids is {dtype}, and ids are integers")
        stamps = file.stamps([path])
        expected = HEAD.size + 12 * sequences + 8 * entries
        # One byte more for each sequence: its mode, as of images
        if stamps[path][0] == expected + sequences:
            raise JobError(f"{path}: sequences have modes, as multimodal ones do; ids of text have none")
        if stamps[path][0] != expected or entries < 2:
            message = f"{path} has {stamps[path][0]} bytes, and its head implies {expected}"
            raise JobError(f"{message} ({sequences} sequences, {entries - 1} documents): it is damaged")
        # Compared by the last sequence alone; that all lie in a row is checked where ends are read
        width = int(dtype[-1])
        tokens, rest = divmod(file.size, width)
        ends = MegatronEnds(path, sequences, entries - 1, width)
        if rest or self._last_end(ends) != file.size:
            message = f"{path} describes {self._last_end(ends)} bytes of ids, but {file.path} has {file.size}"
            raise JobError(f"{message}: it was cut short, or is of other data")
        return Shard(file.absolute, dtype, 0, tokens, ends=ends, stamps=stamps)

    def _head(self, file: Candidate) -> bytes:
        path = file.beside(".idx")
        if not file.has(path):
            return b""
        return read_part(path, HEAD.size)

    def _last_end(self, ends: MegatronEnds) -> int:
        """Where the last sequence ends, in bytes, by its own entries."""
        last = ends.sequences - 1
        (length,) = struct.unpack("<i", read_part(ends.path, 4, HEAD.size + 4 * last))
        (pointer,) = struct.unpack("<q", read_part(ends.path, 8, HEAD.size + 4 * ends.sequences + 8 * last))
        return pointer + length * ends.width
