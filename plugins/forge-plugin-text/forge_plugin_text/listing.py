"""Finds the files of a corpus."""

from __future__ import annotations

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
    """Returns how many files of these patterns are of no known format, by suffix; an empty string if there are none."""
    suffixes = Counter(
        Path(path).suffix or "no suffix" for p in patterns for path in _candidates(p) if not format_of(path)
    )
    kinds = ", ".join(f"{suffix} {count:,}" for suffix, count in suffixes.most_common(4))
    more = ", …" if len(suffixes) > 4 else ""
    return f"{suffixes.total():,} of other formats passed over ({kinds}{more})" if suffixes else ""


def walk(root: str, excluded: Container[str] = ()) -> Iterator[str]:
    """Yields paths of the files below `root`, in no particular order.

    Hidden files and folders, and folders of an `excluded` name, are left out. Linked folders are entered, each once.
    """
    entered: set[tuple[int, int]] = set()
    for folder, subfolders, files in os.walk(root, followlinks=True):
        stat = os.stat(folder)
        if (stat.st_dev, stat.st_ino) in entered:
            subfolders.clear()
            continue
        entered.add((stat.st_dev, stat.st_ino))
        subfolders[:] = [name for name in subfolders if not (name.startswith(".") or name in excluded)]
        yield from (os.path.join(folder, name) for name in files if not name.startswith("."))


def _expand(pattern: str) -> list[str]:
    candidates = _candidates(pattern)
    paths = [path for path in candidates if format_of(path)]
    if not candidates:
        raise JobError(f"{pattern!r} is an empty folder (hidden files do not count); give one that has text")
    if not paths:
        example = f"; the first is {min(candidates)!r}" if candidates else ""
        raise JobError(f"{pattern!r}: none of {len(candidates)} files is of a known format ({_KNOWN}){example}")
    return paths


def _candidates(pattern: str) -> list[str]:
    """Returns existing files of a pattern, of any format."""
    path = os.path.expanduser(pattern)
    if os.path.exists(path):
        return _files_of(path)
    names = [name for match in glob.glob(path, recursive=True) for name in _files_of(match)]
    if not names:
        message = "matches no file" if glob.has_magic(path) else "does not exist"
        raise JobError(f"{pattern!r} {message} (looked from {os.getcwd()}); correct the path or provide the data")
    return names


def _files_of(path: str) -> list[str]:
    return list(walk(path)) if os.path.isdir(path) else [path]


def _distinct(paths: Iterable[str]) -> list[TextFile]:
    """Sort by name, with the first of several names of one file (links, overlapping patterns)."""
    files: dict[str, TextFile] = {}
    for name in sorted({Path(os.path.normpath(path)).as_posix() for path in paths}):
        files.setdefault(os.path.realpath(name), TextFile(name, os.path.abspath(name)))
    return list(files.values())
