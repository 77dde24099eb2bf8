"""Finds the files of a corpus."""

from __future__ import annotations

import functools
import glob
import os
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator
from pathlib import Path

from attrs import frozen

from forge_core.contracts.errors import JobError

FORMATS = (".txt", ".py", ".md", ".jsonl")
COMPRESSIONS = (".gz", ".zst")
_KNOWN = f"{', '.join(FORMATS)}, each also with {' or '.join(COMPRESSIONS)}"


@frozen
class TextFile:
    """A file of the corpus: its `name` in held-out lists, and its absolute `path`."""

    name: str
    path: str

    @property
    def format(self) -> str:
        """One of `FORMATS`, or an empty string."""
        return format_of(self.path)

    @property
    def compression(self) -> str:
        """One of `COMPRESSIONS`, or an empty string."""
        suffix = Path(self.path).suffix.lower()
        return suffix if suffix in COMPRESSIONS else ""

    def stat(self) -> os.stat_result:
        """Returns the file's status; raises `JobError` if it is missing or not accessible."""
        try:
            return os.stat(self.path)
        except OSError as error:
            raise JobError(f"{self.path}: cannot be read ({error.strerror})") from error


def format_of(path: str) -> str:
    """Returns the format by a file's name, ignoring a compression suffix; an empty string if not in `FORMATS`."""
    stem, suffix = os.path.splitext(path.lower())
    if suffix in COMPRESSIONS:
        suffix = os.path.splitext(stem)[1]
    return suffix if suffix in FORMATS else ""


def find_files(patterns: Collection[str]) -> list[TextFile]:
    """Returns the files of paths, folders and globs, each once, sorted by name.

    A file's name is its path by the pattern, in normal form (`data/a.txt`). Folders are searched to any depth for files
    of known formats; hidden files and folders are left out, links are followed.

    Raises:
        JobError: one problem for each pattern without files.
    """
    names: list[str] = []
    problems: list[JobError] = []
    for pattern in patterns:
        try:
            names += _expand(pattern)
        except JobError as error:
            problems.append(error)
    if problems:
        raise JobError(problem for error in problems for problem in error.problems)
    return _distinct(names)


def passed_over(patterns: Collection[str]) -> str:
    """Returns how many files of these patterns are not read: of no known format, by suffix, and what `walk` leaves out.

    An empty string if all are read.
    """
    left_out = Counter[str]()
    suffixes = Counter(
        Path(path).suffix or "no suffix" for p in patterns for path in _candidates(p, left_out) if not format_of(path)
    )
    kinds = ", ".join(f"{suffix} {count:,}" for suffix, count in suffixes.most_common(4))
    more = ", …" if len(suffixes) > 4 else ""
    notes = [f"{suffixes.total():,} of other formats passed over ({kinds}{more})"] if suffixes else []
    return ", ".join([*notes, *(f"{count:,} {what} left out" for what, count in sorted(left_out.items()))])


RUN_FILES = {"job.toml", "provenance.json"}
"""Files that mark a run folder."""


def walk(root: str, excluded: Container[str] = (), left_out: Counter[str] | None = None) -> Iterator[str]:
    """Yields paths of the regular files below `root`, in no particular order.

    Hidden files and folders, folders of an `excluded` name, run folders, pipes, devices and broken links are left out;
    `left_out` counts the last three. Linked folders are entered, each once.
    """
    counts = Counter[str]() if left_out is None else left_out
    folders, entered = [root], set[tuple[int, int]]()
    while folders:
        folder = folders.pop()
        stat = os.stat(folder)
        if (stat.st_dev, stat.st_ino) in entered:
            continue
        entered.add((stat.st_dev, stat.st_ino))
        try:
            with os.scandir(folder) as scan:
                entries = [entry for entry in scan if not entry.name.startswith(".")]
        except PermissionError:
            counts["unreadable folders"] += 1
            continue
        # Forge's own texts (plan, samples, metrics) are not for training, and change while a run goes on
        if {entry.name for entry in entries} >= RUN_FILES:
            counts["run folders"] += 1
            continue
        for entry in entries:
            if entry.is_dir():
                folders += [] if entry.name in excluded else [entry.path]
            elif entry.is_file():  # known without another system call, but for links
                yield entry.path
            else:
                counts["broken links" if entry.is_symlink() else "pipes or devices"] += 1


def _expand(pattern: str) -> list[str]:
    candidates = _candidates(pattern)
    paths = [path for path in candidates if format_of(path)]
    if not candidates:
        raise JobError(
            f"{pattern!r} is an empty folder (hidden files and run folders do not count); give one that has text"
        )
    if not paths:
        example = f"; the first is {min(candidates)!r}" if candidates else ""
        raise JobError(f"{pattern!r}: none of {len(candidates)} files is of a known format ({_KNOWN}){example}")
    return paths


def _candidates(pattern: str, left_out: Counter[str] | None = None) -> list[str]:
    """Returns existing files of a pattern, of any format."""
    path = os.path.expanduser(pattern)
    if os.path.exists(path):
        return _files_of(path, left_out)
    matches = [match for match in glob.glob(path, recursive=True) if not _in_run(os.path.dirname(match))]
    names = [name for match in matches for name in _files_of(match, left_out)]
    if not names:
        message = "matches no file" if glob.has_magic(path) else "does not exist"
        raise JobError(f"{pattern!r} {message} (looked from {os.getcwd()}); correct the path or provide the data")
    return names


@functools.cache
def _in_run(folder: str) -> bool:
    """Whether a folder is that of a run, or below one."""
    is_run = all(os.path.isfile(os.path.join(folder, name)) for name in RUN_FILES)
    above = os.path.dirname(folder)
    return is_run or (above != folder and _in_run(above))


def _files_of(path: str, left_out: Counter[str] | None = None) -> list[str]:
    if os.path.isdir(path):
        return list(walk(path, left_out=left_out))
    if os.path.isfile(path):
        return [path]
    if left_out is not None:
        left_out["pipes or devices"] += 1
    return []


def _distinct(paths: Iterable[str]) -> list[TextFile]:
    """Sort by name, with the first of several names of one file (links, overlapping patterns)."""
    files: dict[str, TextFile] = {}
    for name in sorted({Path(os.path.normpath(path)).as_posix() for path in paths}):
        files.setdefault(os.path.realpath(name), TextFile(name, os.path.abspath(name)))
    return list(files.values())
