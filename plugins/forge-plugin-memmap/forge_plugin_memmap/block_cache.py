"""Blocks of remote files on the local disk: one file of a fixed size for all runs of a machine.

fsspec's own caches (`blockcache`, `filecache`, `simplecache`) grow without a bound. This one cannot: it is a file of
slots, and an index with two numbers for each. A block may lie in any of the `WAYS` slots of its set, which follows from
its key; when all are taken, the slot that was filled first is used again. Training draws sequences at random, once an
epoch, so a rule that keeps what was used last would keep nothing better.

Several processes share the files. A slot is filled under a lock of its set alone, with its key removed before and
written after, and a reader compares key and fill number before and after it has read: so it never gets a block that is
replaced meanwhile, and waits for no one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from threading import Lock

import numpy as np

from forge_core.contracts.errors import DataError, JobError
from forge_kit.data.cache import cache_root

WAYS = 8
"""Slots in which a block may lie."""
BLOCK = 1 << 20
"""Bytes of a block: see `docs/how-to/tokens-you-already-have.md`."""
SLOT = np.dtype([("key", "<u8"), ("fill", "<u8")])
"""`key`: of the block, 0: none; `fill`: how many blocks this set has had, when this one was written."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class BlockCache:
    """A cache of blocks in a folder. May be used by several threads, and by several processes at once."""

    def __init__(self, folder: Path, size: int, block: int = BLOCK) -> None:
        """Open the cache, or create it.

        Args:
            folder: its own, which is created if need be.
            size: bytes of all blocks.
            block: bytes of each.

        Raises:
            JobError: the disk does not have so much room.
        """
        sets = max(1, size // (block * WAYS))
        self.block = block
        # Another size has other sets, and a process that uses them would lose them
        folder = folder / f"{sets * WAYS}x{block}"
        folder.mkdir(parents=True, exist_ok=True)
        self._data = _opened(folder / "blocks")
        # Its own file: to close any descriptor of the locked one would end the locks of this process
        self._locks = _opened(folder / "locks")
        self._lock = Lock()
        # What it takes already is free to it
        room = shutil.disk_usage(folder).free + os.fstat(self._data).st_blocks * 512
        if size > room:
            message = (
                f"remote_cache_gb: the cache of {size / 1e9:.3g} GB in {folder} is larger than the room on its disk"
            )
            raise JobError(f"{message}, {room / 1e9:.3g} GB; lower it, or set FORGE_CACHE to a folder on a larger disk")
        with _locked(self._locks, 0):
            state = folder / "boot"
            # After a crash of the machine, slots may lack what the index has; no process has it open then
            if not state.exists() or state.read_text() != _boot():
                with (folder / "index").open("wb") as index:
                    index.truncate(SLOT.itemsize * WAYS * sets)
                os.truncate(self._data, 0)
                state.write_text(_boot())
        self._slots = np.memmap(folder / "index", SLOT, "r+", shape=(sets, WAYS))

    def __del__(self) -> None:
        for descriptor in (getattr(self, "_data", -1), getattr(self, "_locks", -1)):
            if descriptor >= 0:
                os.close(descriptor)

    def read(self, name: str, number: int, size: int, part: slice, fetch: Callable[[], bytes]) -> bytes:
        """Returns a part of a block.

        Args:
            name: of the file and its version.
            number: of the block in it.
            size: bytes that the block must have; the last of a file may be short.
            part: the bytes of it that are returned, `0 <= start <= stop <= size`.
            fetch: returns the block, where the cache does not have it.

        Raises:
            DataError: `fetch` returned another size, or the disk is full.
        """
        digest = hashlib.blake2b(f"{name}\0{number}".encode(), digest_size=16).digest()
        # Never 0, which is an empty slot
        key = int.from_bytes(digest[:8], "little") | 1
        place = int.from_bytes(digest[8:], "little") % len(self._slots)
        found = self._find(place, key, part)
        if found is not None:
            return found
        data = fetch()
        if len(data) != size:
            raise DataError(f"{name}: block {number} has {len(data)} bytes, not {size}: it was cut short, or replaced")
        self._keep(place, key, data)
        return data[part]

    def _find(self, place: int, key: int, part: slice) -> bytes | None:
        slots = self._slots[place]
        for way in np.flatnonzero(slots["key"] == key):
            before = slots[way].copy()
            # Only these bytes: a sequence has few thousand, and a block a million
            data = os.pread(self._data, part.stop - part.start, (place * WAYS + int(way)) * self.block + part.start)
            # Another process may have begun to use the slot for another block meanwhile
            if slots[way] == before and before["key"] == key and len(data) == part.stop - part.start:
                return data
        return None

    def _keep(self, place: int, key: int, data: bytes) -> None:
        # Locks of files hold between processes, and not between threads of one
        with self._lock, _locked(self._locks, place):
            slots = self._slots[place]
            # Two processes may have fetched it at once
            if key in slots["key"]:
                return
            way = int(slots["fill"].argmin())
            fill = int(slots["fill"].max()) + 1
            # In this order: a reader that sees the new key finds the whole block, also if this process dies in between
            slots["key"][way] = 0
            slots["fill"][way] = fill
            try:
                _write(self._data, data, (place * WAYS + way) * self.block)
            except OSError as error:
                message = f"the cache of remote blocks cannot be written ({error.strerror})"
                raise DataError(f"{message}; make room, or lower remote_cache_gb") from error
            slots["key"][way] = key


def block_cache(size: int) -> BlockCache:
    """Returns the cache of this machine of so many bytes, opened once in each process."""
    return _cache_of(cache_root() / "remote", size, os.getpid())


@lru_cache
def _cache_of(folder: Path, size: int, process: int) -> BlockCache:
    del process  # one that was forked opens it itself, as the lock of threads may be held in the copy
    return BlockCache(folder, size)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


@contextmanager
def _locked(descriptor: int, byte: int) -> Iterator[None]:
    """Lock one byte of the index against other processes."""
    fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, byte)
    try:
        yield
    finally:
        fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, byte)


def _boot() -> str:
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
