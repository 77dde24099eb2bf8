"""Finds the files of a corpus."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_kit.data.data_files import FileFinder, Listing, missing

FORMATS = (".txt", ".py", ".md", ".jsonl", ".tar")
TAR = ".tar"
"""Archives of texts; they are never compressed, as their documents are read by offset."""
COMPRESSIONS = (".gz", ".zst")
_KNOWN = f"{', '.join(FORMATS[:-1])}, each also with {' or '.join(COMPRESSIONS)}, and .tar"


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
        if suffix == TAR:
            return ""
    return suffix if suffix in FORMATS else ""


def find_files(patterns: Collection[str], finder: FileFinder | None = None) -> list[TextFile]:
    """Returns the files of paths, folders and globs, each once, sorted by name.

    A file's name is its path by the pattern, in normal form (`data/a.txt`). Folders are searched to any depth for files
    of known formats; `forge_kit.data.data_files` documents which files are left out.

    Args:
        patterns: paths, folders and globs.
        finder: counts the files that are left out; by default they are not counted.

    Raises:
        JobError: one problem for each pattern without files.
    """
    finder = FileFinder() if finder is None else finder
    names: list[str] = []
    # All patterns are tried, so that one check of the job shows every wrong one
    problems: list[JobError] = []
    for pattern in patterns:
        try:
            names += _expand(pattern, finder)
        except JobError as error:
            problems.append(error)
    if problems:
        raise JobError(problem for error in problems for problem in error.problems)
    return _distinct(names)


def left_out(patterns: Collection[str]) -> Mapping[str, int]:
    """Returns what these patterns reach and is not read, with how often: other formats, and what `FileFinder` names."""
    finder = FileFinder()
    paths = [path for pattern in patterns for path in finder.find(pattern)]
    suffixes = Counter(Path(path).suffix or "no suffix" for path in paths if not format_of(path))
    kinds = ", ".join(f"{suffix} {count:,}" for suffix, count in suffixes.most_common(4))
    more = ", …" if len(suffixes) > 4 else ""
    others = {f"files of other formats ({kinds}{more})": suffixes.total()} if suffixes else {}
    return {**others, **finder.left_out}


def _expand(pattern: str, finder: FileFinder) -> list[str]:
    candidates = finder.find(pattern)
    paths = [path for path in candidates if format_of(path)]
    if not candidates:
        raise JobError(f"{missing(pattern)}; correct the path or provide the data")
    if not paths:
        example = f"; the first is {min(candidates)!r}"
        raise JobError(f"{pattern!r}: none of {len(candidates)} files is of a known format ({_KNOWN}){example}")
    return paths


def _distinct(paths: Iterable[str]) -> list[TextFile]:
    """Sort by name, with the first of several names of one file (links, overlapping patterns)."""
    files: dict[str, TextFile] = {}
    listing = Listing()  # a system call for a folder, not for each file
    for name in sorted(set(map(os.path.normpath, paths))):
        files.setdefault(listing.real(name), TextFile(name, os.path.abspath(name)))
    return list(files.values())
