"""Files in object stores and on web servers, by fsspec: `s3://bucket/data`, `gs://…`, `https://…`, `memory://…`.

An address takes the place of a path: it is what messages have, and part of the identity of a corpus. Listings, headers
and indexes are asked of the store; ids come through a cache of blocks (`block_cache`). fsspec finds credentials where
each store's own tools do (environment, profiles, roles); an address that has some is refused, as jobs are kept in runs.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit

from forge_core import report_progress

T = TypeVar("T")
ATTEMPTS = 5
PAUSE_S = 0.5
"""Before the second attempt; each further pause is twice as long."""
VERSIONS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "modified", "created")
"""What changes when an object is written again, as the file systems of fsspec call it; the first one that is known."""
WILDCARDS = "*?["


def is_remote(path: str) -> bool:
    """Whether a path is an address."""
    return "://" in path


def address_fault(path: str) -> str:
    """Returns why an address cannot be used; empty if it can, or is a path."""
    if not is_remote(path):
        return ""
    parts = urlsplit(path)
    if "@" in parts.netloc or parts.query:
        # Without the address: it would be in the log
        where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        fix = "give them to the store's own tools (environment, profile, role), from which fsspec takes them"
        return f"{where}: the address has credentials or a query, and jobs are kept in run folders; {fix}"
    try:
        _system(path)
    except ImportError as error:
        return f"{path}: {error}; pip install forge-plugin-memmap[remote], and the package of this store"
    except ValueError as error:
        return f"{path}: {error}"
    return ""


@lru_cache(64)
def _system_of(protocol: str, host: str, process: int) -> Any:
    """The file system of a store; of each process its own, as clients with an event loop do not survive a fork."""
    from fsspec.core import url_to_fs

    del process
    # Listings are kept by `RemoteFolders`, for as long as they are true of one moment
    return url_to_fs(f"{protocol}://{host}", use_listings_cache=False)[0]


def _system(path: str) -> Any:
    parts = urlsplit(path)
    return _system_of(parts.scheme, parts.netloc, os.getpid())


def attempt(path: str, action: Callable[[], T]) -> T:
    """Call a store, again after failures that may pass.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: the last failure, with the address.
    """
    for number in range(1, ATTEMPTS + 1):
        try:
            return action()
        except (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError):
            # An answer, which another attempt would not change
            raise
        except Exception as error:  # clients raise whatever their HTTP library raises
            if number == ATTEMPTS:
                cause = f"{type(error).__name__}: {error}"
                raise OSError(None, f"no answer in {ATTEMPTS} attempts; the last: {cause}", path) from error
            report_progress(f"waiting for {path}")
            time.sleep(PAUSE_S * 2 ** (number - 1))
    raise AssertionError


def read_range(path: str, start: int, stop: int) -> bytes:
    """Returns bytes [start, stop) of a remote file; fewer where it ends."""

    def ask() -> bytes:
        system = _system(path)
        data: bytes = system.cat_file(system._strip_protocol(path), start=start, end=stop)
        return data

    data = attempt(path, ask) if stop > start else b""
    if len(data) > stop - start:
        # HTTP allows it; each sequence would then download the whole file
        raise OSError(None, "the server sends whole files where a part is asked for; use one that answers ranges", path)
    return data


def read_whole(path: str) -> bytes:
    """Returns the content of a small remote file.

    Raises:
        FileNotFoundError: there is none.
    """
    return attempt(path, lambda: cast(bytes, _system(path).cat_file(_system(path)._strip_protocol(path))))


def open_file(path: str) -> BinaryIO:
    """Opens a file to be read, from its place or from a store."""
    if not is_remote(path):
        return open(path, "rb")
    return cast(BinaryIO, attempt(path, lambda: _system(path).open(_system(path)._strip_protocol(path), "rb")))


def remote_stamp(path: str, info: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """Returns the stamp of a remote file: its size, and a number made of its version.

    Raises:
        OSError: it is not there, or the store does not state its size.
    """
    if info is None or info.get("size") is None:
        info = attempt(path, lambda: cast(Mapping[str, Any], _system(path).info(_system(path)._strip_protocol(path))))
    if info.get("size") is None:
        raise OSError(None, "the server does not state its size, so it cannot be read in parts", path)
    version = next((str(info[key]) for key in VERSIONS if info.get(key)), "")
    # 60 bits, as other stamps are numbers too
    return int(info["size"]), int(hashlib.sha256(version.encode()).hexdigest()[:15], 16), 0, 0


def expand_remote(pattern: str, suffixes: tuple[str, ...]) -> Iterator[tuple[str, bool]]:
    """Yields the files of an address, a folder or a glob, each with whether a folder was named."""
    system = _system(pattern)
    path = system._strip_protocol(pattern)
    if any(letter in path for letter in WILDCARDS):
        found = attempt(pattern, lambda: system.glob(path))
        yield from ((system.unstrip_protocol(name), False) for name in found)
    # A file first: some stores call the beginning of a name a folder
    elif attempt(pattern, lambda: system.isfile(path)) and not pattern.endswith("/"):
        yield pattern, False
    else:
        found = attempt(pattern, lambda: system.find(path))
        yield from ((system.unstrip_protocol(name), True) for name in found if name.endswith(suffixes))


class RemoteFolders:
    """Folders of stores, each listed once, so that thousands of shards cost one request and not thousands."""

    def __init__(self) -> None:
        self._folders: dict[str, Mapping[str, Mapping[str, Any]] | None] = {}

    def has(self, path: str) -> bool:
        """Whether there is such a file."""
        names = self._names(path)
        if names is not None:
            return os.path.basename(path) in names
        return attempt(path, lambda: bool(_system(path).exists(_system(path)._strip_protocol(path))))

    def stamp(self, path: str) -> tuple[int, ...]:
        """See `remote_stamp`."""
        return remote_stamp(path, (self._names(path) or {}).get(os.path.basename(path)))

    def names(self, folder: str) -> list[str]:
        """Returns the names in a folder; none where it cannot be listed."""
        return list(self._names(f"{folder}/") or ())

    def _names(self, path: str) -> Mapping[str, Mapping[str, Any]] | None:
        folder = os.path.dirname(path)
        if folder not in self._folders:
            try:
                self._folders[folder] = self._listed(folder)
            # Servers need not list folders, and then each file is asked for
            except OSError:
                self._folders[folder] = None
        return self._folders[folder]

    def _listed(self, folder: str) -> Mapping[str, Mapping[str, Any]]:
        system = _system(folder)
        entries = attempt(folder, lambda: system.ls(system._strip_protocol(folder), detail=True))
        return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in entries}
