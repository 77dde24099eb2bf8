"""Which files a path, a folder or a glob stands for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from forge_core.contracts.errors import JobError
from forge_kit.data.data_files import FileFinder, missing


class FoundFile(NamedTuple):
    """A file, and how it was reached."""

    path: str
    """In normal form, as the pattern reaches it: `data/a.bin`."""
    in_folder: bool
    """Whether the pattern named a folder that holds it, rather than the file itself."""


def expand(pattern: str, suffixes: tuple[str, ...], finder: FileFinder) -> list[FoundFile]:
    """The files of one pattern, sorted by name.

    A file that is named, by itself or by a glob, is taken whatever its suffix. Folders are searched to any depth for
    files of the `suffixes`; `finder` counts what it leaves out.

    Raises:
        JobError: there are none; names the folder searched.
    """
    files = list(_reach(os.path.expanduser(pattern), suffixes, finder))
    if not files:
        raise JobError(f"{missing(pattern, ', '.join(suffixes))}; correct the path")
    return sorted(files)


def distinct(candidates: Iterable[FoundFile], real: Callable[[str], str] = os.path.realpath) -> list[FoundFile]:
    """Each file once; of several names of one file (links, overlapping patterns), the first. `real` follows links."""
    files: dict[str, FoundFile] = {}
    for file in candidates:
        files.setdefault(real(file.path), file)
    return list(files.values())


def _reach(path: str, suffixes: tuple[str, ...], finder: FileFinder) -> Iterator[FoundFile]:
    for match in finder.matches(path):
        in_folder = os.path.isdir(match)
        for file in finder.files_of(match):
            if file.endswith(suffixes) or not in_folder:
                yield FoundFile(_normal(file), in_folder)


def _normal(path: str) -> str:
    return Path(os.path.normpath(path)).as_posix()
