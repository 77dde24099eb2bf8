"""Damage to data at rest, found as it is read: each block of a file is checked when a process first reads of it.

`FILE.crc32` beside a file has the CRC-32 of each of its blocks (little-endian, four bytes each), written when the file
is made. CRC-32 and not SHA-256: what disks and memory do is no attack, and of a pass over the data it may cost a few
percent at most. Small blocks, since samples are read at random: each first reading of a block reads all of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core import report_progress
from forge_core.contracts.errors import DataError

if TYPE_CHECKING:
    import numpy as np

SHIFT = 16
BLOCK = 1 << SHIFT
"""Bytes."""
SUFFIX = ".crc32"
SUMS = "<u4"
"""NumPy's name of the type of a sum."""


def write_sums(path: Path) -> Path:
    """Write the sums of a file beside it; returns their path."""
    target = sums_of(path)
    with path.open("rb") as file, target.open("wb") as sums:
        while block := file.read(BLOCK):
            sums.write(zlib.crc32(block).to_bytes(4, "little"))
            report_progress()
    return target


def sums_of(path: Path) -> Path:
    """Returns the path of the sums of a file."""
    return path.with_name(path.name + SUFFIX)


def blocks_of(size: int) -> int:
    """Returns how many blocks a file of some bytes has."""
    return -(-size // BLOCK)


class CheckedBlocks:
    """Blocks of a file of `size` bytes, each of which is checked once by this process. For several threads."""

    def __init__(self, size: int, fault: Callable[[int], str]) -> None:
        """`fault` returns what is wrong with the block of a number; empty if nothing is."""
        self._fault = fault
        self.checked = bytearray(blocks_of(size))
        """Whether each block was: of a file of 1 TB these are 16 MB. A reader may look itself, to save a call."""

    def demand(self, start: int, stop: int) -> None:
        """Check the blocks of bytes [start, stop).

        Raises:
            DataError: one is damaged.
        """
        for number in range(start >> SHIFT, blocks_of(stop)) if start < stop else ():
            if not self.checked[number]:
                if message := self._fault(number):
                    raise DataError(message)
                self.checked[number] = 1


def checked_map(path: Path) -> CheckedBlocks:
    """Returns the blocks of a file that is read through a memory map, by the sums beside it."""
    import numpy as np

    size = path.stat().st_size
    data = np.memmap(path, np.uint8, mode="r") if size else np.empty(0, np.uint8)
    sums = np.fromfile(sums_of(path), SUMS)
    if len(sums) != blocks_of(size):
        raise DataError(f"{sums_of(path)} has {len(sums)} sums, for {blocks_of(size)} blocks: it is damaged")
    advice = f"remove the folder {path.parent}, and it is made again"

    def fault(number: int) -> str:
        return sum_fault(path, number, data[number * BLOCK : (number + 1) * BLOCK], int(sums[number]), advice)

    return CheckedBlocks(size, fault)


def sum_fault(path: object, number: int, block: Any, expected: int, advice: str) -> str:
    """Returns how a block differs from its sum; empty if it does not."""
    if zlib.crc32(block) == expected:
        return ""
    place = f"bytes {number * BLOCK:,} to {number * BLOCK + len(block):,}"
    return f"{path}: {place} are not those that were written (CRC-32): disk or memory has damaged them; {advice}"


def range_fault(path: object, ids: np.ndarray, first: int, limit: int) -> str:
    """Returns which of some ids is not in [0, limit); empty if all are. `first` is the place of the first of them."""
    import numpy as np

    if not len(ids) or (int(ids.max()) < limit and int(ids.min()) >= 0):
        return ""
    place = int(np.flatnonzero((ids >= limit) | (ids < 0))[0])
    text = f"{path}: token {first + place:,} is {int(ids[place])}, beyond the vocabulary of {limit:,} ids"
    return f"{text}: the file has changed or is damaged since it was made or looked at"
