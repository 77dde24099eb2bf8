"""Which files a path, a folder or a glob stands for."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from forge_core.contracts.errors import JobError


class FoundFile(NamedTuple):
    """A file, and how it was reached."""

    path: str
    """In normal form, as the pattern reaches it: `data/a.bin`."""
    in_folder: bool
    """Whether the pattern named a folder that holds it, rather than the file itself."""


def expand(pattern: str, suffixes: tuple[str, ...]) -> list[FoundFile]:
    """The files of one pattern, sorted by name.

    A file that is named, by itself or by a glob, is taken whatever its suffix. Folders are searched to any depth for
    files of the `suffixes`; hidden files and folders are left out, links are followed.

    Raises:
        JobError: there are none; names the folder searched.
    """
    files = list(_reach(os.path.expanduser(pattern), suffixes))
    if not files:
        path = os.path.expanduser(pattern)
        known = ", ".join(suffixes)
        fault = "has no file of a known format" if os.path.isdir(path) else "does not exist"
        fault = "matches no file" if glob.has_magic(path) and not os.path.exists(path) else fault
        raise JobError(f"{pattern!r} {fault} (looked from {os.getcwd()} for {known}); correct the path")
    return sorted(files)


def distinct(candidates: Iterable[FoundFile], real: Callable[[str], str] = os.path.realpath) -> list[FoundFile]:
    """Each file once; of several names of one file (links, overlapping patterns), the first. `real` follows links."""
    files: dict[str, FoundFile] = {}
    for file in candidates:
        files.setdefault(real(file.path), file)
    return list(files.values())


def _reach(path: str, suffixes: tuple[str, ...]) -> Iterator[FoundFile]:
    for match in [path] if os.path.exists(path) else glob.glob(path, recursive=True):
        if not os.path.isdir(match):
            yield FoundFile(_normal(match), in_folder=False)
            continue
        for file in _walk(match):
            if file.endswith(suffixes):
                yield FoundFile(_normal(file), in_folder=True)


def _walk(root: str) -> Iterator[str]:
    entered: set[tuple[int, int]] = set()
    for folder, subfolders, files in os.walk(root, followlinks=True):
        stat = os.stat(folder)
        if (stat.st_dev, stat.st_ino) in entered:  # a link back up
            subfolders.clear()
            continue
        entered.add((stat.st_dev, stat.st_ino))
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        yield from (os.path.join(folder, name) for name in files if not name.startswith("."))


def _normal(path: str) -> str:
    return Path(os.path.normpath(path)).as_posix()
