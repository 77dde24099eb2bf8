"""Which files a path, a folder or a glob of a dataset stands for.

Forge never reads its own runs as data: their texts, pictures and tables change while they train, and a run that learned
them could not be continued. Nor does it open pipes, sockets and devices, which may never end. Everything that is left
out is counted, and shown by `forge-run data` and `forge-run check --data`.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import BinaryIO, Protocol, runtime_checkable

from attrs import field, frozen

from forge_core.checkpoint.run_folder import JOB, PROVENANCE
from forge_core.checkpoint.storage import MANIFEST
from forge_kit.data.cache import cache_root
from forge_kit.tools.outputs import FOLDER_MARK

RUNS, CHECKPOINTS, OUTPUTS = "run folders", "checkpoints", "folders that Forge wrote"
SPECIAL, BROKEN, UNREADABLE = "pipes, sockets or devices", "broken links", "folders that cannot be read"


_STEP = re.compile(r"step-\d+")


@runtime_checkable
class ListsFiles(Protocol):
    """A dataset component that finds its files by `FileFinder`."""

    def left_out(self) -> Mapping[str, int]:
        """Returns what was passed over in its folders, with how often."""


def left_out_note(counts: Mapping[str, int]) -> str:
    """Returns `left out: 2 run folders, 1 broken links`; an empty string if nothing was."""
    listed = ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))
    return f"left out: {listed}" if listed else ""


class Listing:
    """Folders, each listed once: whether a file is there, or is a link, is then known without looking at it."""

    def __init__(self) -> None:
        self._folders: dict[str, dict[str, bool] | None] = {}
        self._real: dict[str, str] = {}

    def has(self, path: str) -> bool:
        """Whether there is such a file, folder or link."""
        folder, name = os.path.split(path)
        names = self._names(folder)
        return os.path.lexists(path) if names is None else name in names

    def real(self, path: str) -> str:
        """As `os.path.realpath`."""
        folder, name = os.path.split(path)
        if (self._names(folder) or {}).get(name, True):  # a link, or not known
            return os.path.realpath(path)
        # Once for each folder, as `realpath` looks at every part of a path
        if folder not in self._real:
            self._real[folder] = os.path.realpath(folder)
        return os.path.join(self._real[folder], name)

    def _names(self, folder: str) -> dict[str, bool] | None:
        """The names in a folder, each with whether it is a link; None: files may be opened in it, but not listed."""
        if folder not in self._folders:
            try:
                with os.scandir(folder or ".") as entries:
                    self._folders[folder] = {entry.name: entry.is_symlink() for entry in entries}
            except OSError:
                self._folders[folder] = None
        return self._folders[folder]


@frozen
class FileFinder:
    """Finds files, and counts what it leaves out."""

    _left_out: dict[str, str] = field(factory=dict, init=False)
    """What was passed over, by its path: several patterns may reach one folder."""

    @property
    def left_out(self) -> Counter[str]:
        """How much of each sort was passed over."""
        return Counter(self._left_out.values())

    def find(self, pattern: str) -> list[str]:
        """Returns the regular files of a path, a folder or a glob, in no particular order; none if it has none."""
        return [file for match in self.matches(pattern) for file in self.files_of(match)]

    def matches(self, pattern: str) -> list[str]:
        """Returns the paths that a pattern stands for, each for `files_of`.

        A path that exists stands for itself, whatever its characters. What a glob matches inside of a run is left out,
        unless the part of it without wildcards leads into the run.
        """
        path = os.path.expanduser(pattern)
        if os.path.lexists(path):
            return [path]
        return self.outside_outputs(glob.glob(path, recursive=True), _literal_folder(path))

    def outside_outputs(self, paths: Iterable[str], base: str) -> list[str]:
        """Returns the paths below a folder `base` that are in no run, and in nothing else that Forge wrote."""
        # A glob may match thousands of files of one folder, which is looked at once
        known: dict[str, bool] = {}
        return [path for path in paths if not self._inside_output(path, base, known)]

    def files_of(self, path: str) -> list[str]:
        """Returns the regular files of a file or a folder, which is searched to any depth (see `walk`)."""
        if os.path.isdir(path):
            return list(self.walk(path))
        if os.path.isfile(path):
            return [path]
        self._leave_out(path, SPECIAL if os.path.exists(path) else BROKEN)
        return []

    def walk(self, root: str, excluded: Container[str] = ()) -> Iterator[str]:
        """Yields the regular files below a folder, in no particular order.

        Hidden files and folders and folders of an `excluded` name are left out, and what `left_out` counts. Linked
        folders are entered, each folder once.
        """
        folders = [root]
        entered = set[tuple[int, int]]()
        cache = _cache_identity()
        while folders:
            folder = folders.pop()
            # Not by path: links may lead to one folder in several ways, or in a circle
            identity = _identity(folder)
            if identity is None or identity in entered:
                continue
            entered.add(identity)
            try:
                with os.scandir(folder) as scan:
                    entries = list(scan)
            except OSError:
                self._leave_out(folder, UNREADABLE)
                continue
            if what := OUTPUTS if identity == cache else _output(folder, {entry.name for entry in entries}):
                self._leave_out(folder, what)
                continue
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if _is(entry.is_dir):
                    folders += [] if entry.name in excluded else [entry.path]
                elif _is(entry.is_file):  # known without another system call, but for links
                    yield entry.path
                else:
                    self._leave_out(entry.path, BROKEN if entry.is_symlink() else SPECIAL)

    def _leave_out(self, path: str, what: str) -> None:
        # Only the folder is resolved: a broken link is known by its own path
        folder, name = os.path.split(path)
        self._left_out[os.path.join(os.path.realpath(folder), name)] = what

    def _inside_output(self, path: str, base: str, known: dict[str, bool]) -> bool:
        """Whether a folder above a match, below `base`, is one of Forge's; each such folder is counted once."""
        folder = os.path.dirname(path)
        if len(folder) <= len(base) or folder == path:
            return False
        if folder not in known:
            what = _output(folder, _names(folder)) or (OUTPUTS if _identity(folder) == _cache_identity() else "")
            above = self._inside_output(folder, base, known)
            known[folder] = bool(what) or above
            if what and not above:
                self._leave_out(folder, what)
        return known[folder]


def missing(pattern: str, known: str = "") -> str:
    """Returns why a pattern has no files.

    Args:
        pattern: as the user wrote it.
        known: the suffixes that were looked for.
    """
    path = os.path.expanduser(pattern)
    if os.path.isdir(path):
        fault = "has no data (hidden files, run folders, pipes and devices are left out)"
    elif os.path.exists(path):
        fault = "is a pipe, a socket or a device, not a file"
    else:
        fault = "matches no file" if glob.has_magic(path) and not os.path.islink(path) else "does not exist"
    return f"{pattern!r} {fault} (looked from {os.getcwd()}{f' for {known}' if known else ''})"


def _output(folder: str, names: Collection[str]) -> str:
    """Returns what a folder of Forge's is, by the names in it; an empty string for any other."""
    if JOB in names and PROVENANCE in names:
        return RUNS
    if MANIFEST in names and _STEP.fullmatch(os.path.basename(folder)):
        return CHECKPOINTS
    return OUTPUTS if FOLDER_MARK in names else ""


def _names(folder: str) -> list[str]:
    with suppress(OSError):
        return os.listdir(folder or ".")
    return []


def _literal_folder(pattern: str) -> str:
    """Returns the folder of a glob that no wildcard has a part in; empty if it starts with one."""
    folder = os.path.dirname(pattern)
    while glob.has_magic(folder):
        folder = os.path.dirname(folder)
    return folder


def _identity(folder: str) -> tuple[int, int] | None:
    """Device and inode of a folder; None if it is not there, or may not be looked at."""
    with suppress(OSError):
        status = os.stat(folder)
        return status.st_dev, status.st_ino
    return None


def _cache_identity() -> tuple[int, int]:
    return _identity(str(cache_root())) or (-1, -1)  # of no folder


def _is(question: Callable[[], bool]) -> bool:
    """Returns what an entry of a folder answers; False for a link that leads to itself."""
    with suppress(OSError):
        return question()
    return False


def open_regular(path: str) -> BinaryIO:
    """Open a file that data name for reading.

    Raises:
        OSError: it is not there, or is a pipe, a socket or a device, which may never end.
    """
    # Without O_NONBLOCK the call waits until somebody writes into a pipe
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "not a regular file", path)
    # O_NONBLOCK stays set, which has no effect on a regular file
    return open(number, "rb")
