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
            # Other ranks may wait for this one
            report_progress()
    return target


def sums_of(path: Path) -> Path:
    """Returns the path of the sums of a file."""
    return path.with_name(path.name + SUFFIX)


def native_sums(path: object, stored: np.ndarray, size: int) -> memoryview:
    """Returns the sums of a file of `size` bytes as integers of Python.

    Raises:
        DataError: there are more or fewer than the file has blocks.
    """
    if len(stored) != blocks_of(size):
        raise DataError(f"{path} has {len(stored)} sums, for {blocks_of(size)} blocks: it is damaged")
    # A memoryview yields integers of Python, which compare faster than scalars of NumPy
    return stored.astype("=u4").data


def blocks_of(size: int) -> int:
    """Returns how many blocks a file of some bytes has."""
    return -(-size // BLOCK)


class CheckedBlocks:
    """Blocks of a file of `size` bytes, each of which is checked once by this process. For several threads."""

    def __init__(self, size: int, fault: Callable[[int], str]) -> None:
        """`fault` maps the number of a block to a description of its fault; empty if it has none."""
        self._fault = fault
        self.checked = bytearray(blocks_of(size))
        """Whether each block was: of a file of 1 TB these are 16 MB. A reader may look itself, to save a call."""
        self.is_complete = not self.checked
        """Whether all were, so that a reader need not look."""
        # All blocks before it are checked, so the search for the next one need not begin at the start
        self._first_unchecked = 0

    def demand(self, start: int, stop: int) -> None:
        """Check the blocks of bytes [start, stop).

        Raises:
            DataError: one is damaged.
        """
        if self.is_complete or start >= stop:
            return
        checked, fault, end = self.checked, self._fault, blocks_of(stop)
        number = checked.find(0, start >> SHIFT, end)  # a search in C passes those that were checked
        while number >= 0:
            if message := fault(number):
                raise DataError(message)
            checked[number] = 1
            self._note_progress()
            number = checked.find(0, number + 1, end)

    def _note_progress(self) -> None:
        # Based on the marks and not on a counter: two threads may check the same block, and would count it twice
        first = self.checked.find(0, self._first_unchecked)
        if first < 0:
            self.is_complete = True
        else:
            self._first_unchecked = first


def checked_map(path: Path, data: np.ndarray) -> CheckedBlocks:
    """Returns the blocks of a file that is read through a memory map, by the sums beside it.

    Args:
        path: the file.
        data: its bytes, of the map through which it is read: the pages of a second one would be mapped once more.
    """
    import numpy as np

    sums = native_sums(sums_of(path), np.fromfile(sums_of(path), SUMS), len(data))
    advice = f"remove the folder {path.parent}, and it is made again"
    content = data.data  # a slice of it takes a tenth of a microsecond, of a map of NumPy's one

    def fault(number: int) -> str:
        return sum_fault(path, number, content[number << SHIFT : (number + 1) << SHIFT], sums[number], advice)

    return CheckedBlocks(len(data), fault)


def sum_fault(path: object, number: int, block: Any, expected: int, advice: str) -> str:
    """Returns how a block differs from its sum; empty if it does not."""
    if zlib.crc32(block) == expected:
        return ""
    place = f"bytes {number * BLOCK:,} to {number * BLOCK + len(block):,}"
    return f"{path}: {place} are not those that were written (CRC-32): disk or memory has damaged them; {advice}"


def range_fault(path: object, ids: np.ndarray, first: int, limit: int) -> str:
    """Returns which of some ids is not in [0, limit); empty if all are. `first` is the place of the first of them."""
    import numpy as np

    # Two passes without a temporary array; the place is only needed for the message
    if not len(ids) or (int(ids.max()) < limit and int(ids.min()) >= 0):
        return ""
    place = int(np.flatnonzero((ids >= limit) | (ids < 0))[0])
    text = f"{path}: token {first + place:,} is {int(ids[place])}, beyond the vocabulary of {limit:,} ids"
    return f"{text}: the file has changed or is damaged since it was made or looked at"
