"""Folders kept on disk from run to run: each appears whole or not at all, and damage to one is found.

A folder is written under another name, described by a manifest (sizes and SHA-256), synced and renamed, so it is never
seen half made. The first of several processes that need one makes it while the others wait on a lock. Where the file
system has no locks, each makes its own and the first rename wins.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

import attrs
from attrs import frozen

from forge_core import report_progress
from forge_core.checkpoint.storage import publish, sync
from forge_core.contracts.errors import ForgeError
from forge_core.files import write_atomically
from forge_kit.data.block_sums import SUFFIX, write_sums

logger = logging.getLogger(__name__)

Verify = Literal["sizes", "full"]
MANIFEST = "manifest.json"
FORMAT = 1
PROGRESS = "progress.json"
PARTIAL = "partial"
"""Suffix of a folder in the making that the next process continues."""
SAVE_INTERVAL_S = 10.0
ABANDONED_AFTER_S = 3600.0
"""A folder in the making that nobody has written to for so long belongs to a process that died."""


@frozen
class CachedFolder:
    """An intact folder of the cache, and what its maker noted about it."""

    path: Path
    info: Mapping[str, Any]
    digests: Mapping[str, str] = attrs.field(factory=dict)
    """SHA-256 (hex) of its files, by name."""

    def identity(self, part: str) -> str:
        """Identity of the data read from it (see `HasIdentity`), by content: a folder made again has the same.

        Args:
            part: distinguishes several things in one folder.
        """
        return digest_of(part, dict(self.digests)) if self.digests else ""


class Progress:
    """How far the making of a folder of the cache has come, kept in that folder while it is made.

    A process that makes a folder with `resumable` and dies leaves it; the next one finds what was saved here.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / PROGRESS
        self._saved_at = time.monotonic()
        try:
            self.state: Mapping[str, Any] = json.loads(self._path.read_bytes())
        # No state, or a damaged one: the work begins again
        except (OSError, ValueError):
            self.state = {}

    @property
    def is_due(self) -> bool:
        """Whether the last save was long enough ago for another one."""
        return time.monotonic() - self._saved_at >= SAVE_INTERVAL_S

    def save(self, state: Mapping[str, Any]) -> None:
        """Save a state (plain JSON). The data that it refers to must have been synced before."""
        write_atomically(self._path, json.dumps(state).encode())
        self._saved_at = time.monotonic()

    def finish(self) -> None:
        """Remove the state: the folder is complete."""
        self._path.unlink(missing_ok=True)


class _Unusable(Exception):
    """Reason that a folder of the cache cannot be used."""


def cache_root() -> Path:
    """Returns `$FORGE_CACHE`, else `$XDG_CACHE_HOME/forge`, else `~/.cache/forge`."""
    if folder := os.environ.get("FORGE_CACHE"):
        return Path(folder).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "forge"


def cached_folder(
    group: str,
    key: str,
    make: Callable[[Path], Mapping[str, Any]],
    verify: Verify = "sizes",
    resumable: bool = False,
    sums: bool = False,
) -> CachedFolder:
    """Returns the folder of this key, made if there is none, made again (with a warning) if it is damaged.

    Args:
        group: kind of content; a folder below the cache's root.
        key: a digest of everything that the contents depend on.
        make: writes the files into the empty folder that it receives; returns an entry for the manifest (plain JSON).
        verify: `sizes` compares the size of every file with the manifest, `full` its SHA-256 too.
        resumable: whether `make` continues in a folder that a process left when it died (see `Progress`). One that
            raises an error leaves none.
        sums: whether each file gets the sums of its blocks beside it, by which readers find damage
            (`forge_kit.data.block_sums`).

    Raises:
        ForgeError: the cache cannot be written.
    """
    folder = cache_root() / group / key
    try:
        return _open(folder, verify)
    except _Unusable:
        pass  # below, under the lock, it is opened again: made if there is none, and if it is damaged, with a warning
    with writable_cache(), locked(folder) as is_alone:
        try:
            return _open(folder, verify)  # another process may have made it meanwhile
        except _Unusable as reason:
            if folder.exists():
                logger.warning("the cached %s is damaged (%s); making it again", folder, reason)
        # Without a lock, another process may be writing there: each process then makes its own folder, from the start.
        partial = folder.with_name(f".{folder.name}.{PARTIAL}") if resumable and is_alone else None
        return _make(folder, _with_sums(make) if sums else make, verify, partial)


def _with_sums(make: Callable[[Path], Mapping[str, Any]]) -> Callable[[Path], Mapping[str, Any]]:
    def make_both(folder: Path) -> Mapping[str, Any]:
        info = make(folder)
        # `sorted` lists all files before sums appear among them
        for path in sorted(folder.iterdir()):
            write_sums(path)
        return info

    return make_both


@contextmanager
def writable_cache() -> Iterator[None]:
    """Within it, a failure to write below the cache's root raises an error that explains how to choose another."""
    try:
        yield
    except OSError as error:
        if not _concerns_cache(error):
            raise
        where, fix = error.filename or cache_root(), "free space, or set FORGE_CACHE to a folder that can be written"
        raise ForgeError(f"cannot write the cache: {where}: {error.strerror}; {fix}") from error


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock of `path`, a place in the cache; it is also released if the process dies.

    Yields:
        Whether the file system has locks, so that this process is the only one.
    """
    # In a folder that is never cleaned up: once a lock's file is removed, others lock a new file at once
    lock = cache_root() / "locks" / "-".join(path.relative_to(cache_root()).parts)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("ab") as file:
        yield _acquire(file, path)


def remove_leftovers(path: Path) -> None:
    """Remove what killed processes left of `write_atomically` beside `path`; only while no other writes it."""
    for leftover in path.parent.glob(f".{path.name}.*"):
        leftover.unlink()


def file_digest(path: str | Path) -> str:
    """Returns the SHA-256 (hex) of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(*parts: object) -> str:
    """Returns the SHA-256 (hex) of plain JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _open(folder: Path, verify: Verify) -> CachedFolder:
    """Returns the folder; raises `_Unusable` if it is missing or differs from its manifest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if (manifest["format"], manifest["key"]) != (FORMAT, folder.name):
            raise _Unusable(f"{MANIFEST} describes another folder")
        for name, expected in manifest["files"].items():
            _check(folder / name, expected, verify)
        files = manifest["files"].items()
        # Without sums, which follow from the rest: a folder made without them has the same identity
        digests = {name: expected["sha256"] for name, expected in files if not name.endswith(SUFFIX)}
        return CachedFolder(folder, manifest["info"], digests)
    # A manifest of another form counts as damage: the folder is made again
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Unusable(f"{MANIFEST} cannot be read: {error}") from error


def _check(path: Path, expected: Mapping[str, Any], verify: Verify) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise _Unusable(f"{path.name}: {error.strerror}") from error
    if size != expected["size"]:
        raise _Unusable(f"{path.name} has {size} bytes, but its manifest lists {expected['size']}")
    if verify == "full" and file_digest(path) != expected["sha256"]:
        raise _Unusable(f"the SHA-256 of {path.name} does not match its manifest")


def _make(
    folder: Path, make: Callable[[Path], Mapping[str, Any]], verify: Verify, partial: Path | None
) -> CachedFolder:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder)
    temporary = partial or _temporary(folder)
    # A folder that a process left when it died is continued
    temporary.mkdir(exist_ok=True)
    try:
        info = make(temporary)
        _seal(temporary, folder.name, info)
        _publish(temporary, folder, verify)
    except BaseException as error:
        # After an interrupt by the user (or a signal), the work is expected to continue later; an error would recur.
        if partial is None or isinstance(error, Exception) or not (temporary / PROGRESS).exists():
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(temporary, ignore_errors=True)  # if another process was faster
    # Sizes are enough: this folder has just been sealed, or `_publish` has verified the one of another process
    return _open(folder, "sizes")


def _seal(folder: Path, key: str, info: Mapping[str, Any]) -> None:
    """Write the manifest and make everything durable."""
    # Files, then the manifest, then the folder: a manifest that survives a crash describes files that did, too.
    files = {}
    for path in sorted(folder.iterdir()):
        files[path.name] = {"size": path.stat().st_size, "sha256": file_digest(path)}
        sync(path)
    manifest = {"format": FORMAT, "key": key, "files": files, "info": info}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
    sync(folder / MANIFEST)


def _publish(temporary: Path, folder: Path, verify: Verify) -> None:
    """Rename a sealed folder to its name, in place of a damaged one; an intact one of another process stays."""
    try:
        _open(folder, verify)
    except _Unusable:
        if folder.exists():
            # Renamed first, so that no process opens a folder that is being removed
            discarded = _temporary(folder)
            folder.rename(discarded)
            shutil.rmtree(discarded, ignore_errors=True)
    try:
        publish(temporary, folder)
    except OSError as error:
        # Another process was faster; its folder has the same contents, as the key stands for all that they depend on
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")


def _remove_abandoned(folder: Path) -> None:
    for leftover in folder.parent.glob(f".{folder.name}.*"):
        if leftover.suffix == f".{PARTIAL}":
            continue  # what it holds is worth as much as it took to make
        try:
            touched = max(path.stat().st_mtime for path in (leftover, *leftover.iterdir()))
        except OSError:
            continue  # its owner is at work on it
        if touched < time.time() - ABANDONED_AFTER_S:
            shutil.rmtree(leftover, ignore_errors=True)


def _acquire(file: BinaryIO, path: Path) -> bool:
    """Returns whether there are locks."""
    try:
        # First without waiting, so that a wait is announced
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("waiting for another process that makes %s", path)
        report_progress("waiting for another process that makes it")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        # On file systems without locks, such as some network ones
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        logger.warning("no file locks on %s (%s): several processes may do the same work", path, error.strerror)
        return False
    return True


def _concerns_cache(error: OSError) -> bool:
    """Whether the error is about a file of the cache; a full disk is reported without a name."""
    if error.filename is None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return Path(os.fsdecode(error.filename)).is_relative_to(cache_root())
