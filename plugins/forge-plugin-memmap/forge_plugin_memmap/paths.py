"""Which files a path, a folder or a glob stands for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from forge_core.contracts.errors import JobError
from forge_kit.data.data_files import FileFinder, Listing, missing
from forge_plugin_memmap.remote import RemoteFolders, address_fault, expand_remote, is_remote
from forge_plugin_memmap.shards import Stamp, stamp_of


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
    if is_remote(pattern):
        return _expand_remote(pattern, suffixes)
    files = list(_reach(os.path.expanduser(pattern), suffixes, finder))
    if not files:
        raise JobError(f"{missing(pattern, ', '.join(suffixes))}; correct the path")
    return sorted(files)


def _expand_remote(pattern: str, suffixes: tuple[str, ...]) -> list[FoundFile]:
    if fault := address_fault(pattern):
        raise JobError(fault)
    try:
        files = sorted(FoundFile(path, in_folder) for path, in_folder in expand_remote(pattern, suffixes))
    except OSError as error:
        raise JobError(f"{pattern}: cannot be listed ({error.strerror or error})") from error
    if not files:
        raise JobError(f"{pattern}: there is no such file, and no folder with {', '.join(suffixes)}; correct the path")
    return files


class AnyListing(Listing):
    """Folders on disks and in stores, each listed once."""

    def __init__(self) -> None:
        super().__init__()
        self.remote = RemoteFolders()

    def has(self, path: str) -> bool:
        """See `Listing`."""
        return self.remote.has(path) if is_remote(path) else super().has(path)

    def real(self, path: str) -> str:
        """See `Listing`; an address is its own."""
        return path if is_remote(path) else super().real(path)

    def names(self, folder: str) -> list[str]:
        """Returns the names in a folder."""
        return self.remote.names(folder) if is_remote(folder) else os.listdir(folder or ".")

    def stamp(self, path: str) -> Stamp:
        """Returns the stamp of a file; raises `OSError` if there is none."""
        return self.remote.stamp(path) if is_remote(path) else stamp_of(os.stat(path))


def absolute(path: str) -> str:
    """Returns the absolute path; an address as it is."""
    return path if is_remote(path) else os.path.abspath(path)


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
