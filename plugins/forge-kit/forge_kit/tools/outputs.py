"""Where commands write: only Forge's own files are overwritten, and unwritable paths are refused in one sentence."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from forge_core.checkpoint.storage import publish
from forge_core.contracts.errors import JobError
from forge_core.files import write_atomically

MARK = "forge-run-output"
"""What each single file that a command writes has near its start or its end, as its format has room for it: a tag, a
comment, a key or metadata. The next command may replace a file that has it, and no other file."""
FOLDER_MARK = ".forge-output"
"""File by which a folder outside of run folders is known as one that a plugin has made; see `mark_output`."""
ENDS = 1 << 16
"""Bytes from the start and from the end of a file that are searched for the mark."""


def free_folder(path: Path, option: str, records: Collection[str] = ()) -> Path:
    """Returns where a command may make its folder; nothing is made yet.

    Args:
        path: as the user wrote it; `~` is the home folder.
        option: by which errors name it (`--out`).
        records: names of files by which the folder of an earlier command is known, which may be continued.

    Raises:
        JobError: there is something else, or it cannot be written.
    """
    path = path.expanduser()
    if os.path.isdir(path) and any(path.iterdir()) and not any(_has_begun(path, name) for name in records):
        raise JobError(f"{option} {path} is not empty; name a new folder")
    _demand_writable(path, option)
    return path


def _has_begun(folder: Path, name: str) -> bool:
    """Whether there is such a file, or what a killed process left of it: see `write_atomically`."""
    return (folder / name).is_file() or any(folder.glob(f".{name}.*"))


def new_folder(path: Path, option: str, records: Collection[str] = ()) -> Path:
    """A folder for all that a command writes, which is made; for arguments and errors see `free_folder`."""
    path = free_folder(path, option, records)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"{option} {path} cannot be made: {error.strerror}; name another folder") from None
    return path


def free_path(path: Path, option: str) -> Path:
    """Returns where a command may make a file or folder: a path at which there is nothing yet.

    Args:
        path: as the user wrote it; `~` is the home folder.
        option: by which errors name it (`--out`).

    Raises:
        JobError: there is something, or it cannot be written.
    """
    path = path.expanduser()
    # A broken link is something too
    if os.path.lexists(path):
        raise JobError(f"{option} {path} exists already; name another, or remove it")
    _demand_writable(path.parent, option)
    return path


def mark_output(folder: Path) -> None:
    """Mark a folder in which nothing is data: one that a plugin makes outside of run folders."""
    (folder / FOLDER_MARK).touch()


@contextmanager
def unfinished(path: Path, option: str) -> Iterator[Path]:
    """A path to make a file or folder at, which is renamed to `path` when the context ends, and removed if that fails.

    Raises:
        JobError: there is something at `path` already, or it cannot be written.
    """
    path = free_path(path, option)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Of a name that no folder of the user's has, as it is removed with all that is in it
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".unfinished", dir=path.parent))
    except OSError as error:
        raise JobError(f"{option} {path} cannot be written: {error.strerror}; name another folder") from None
    try:
        yield aside / path.name
        free_path(path, option)  # hours may have passed
        publish(aside / path.name, path)
    finally:
        # After success too: the rename has left an empty folder
        shutil.rmtree(aside, ignore_errors=True)


def output_file(path: Path, option: str, suffixes: Collection[str] = ()) -> Path:
    """Returns where a command may write a single file: a new one, or in place of one that a command has written.

    Args:
        path: as the user wrote it; `~` is the home folder.
        option: by which errors name it (`--out`).
        suffixes: of the formats (`.png`), in lower case; empty: any.

    Raises:
        JobError: the suffix is another, the file is the user's, or it cannot be written there.
    """
    path = path.expanduser()
    if suffixes and path.suffix.lower() not in suffixes:
        raise JobError(f"{option} {path}: {path.suffix!r} is no format; end it in {' or '.join(suffixes)}")
    if os.path.isdir(path):
        raise JobError(f"{option} {path} is a folder; name another file")
    # A link that leads nowhere counts, too: it would be replaced
    if os.path.lexists(path) and not is_output(path):
        raise JobError(f"{option} {path} exists already, and no command of forge-run wrote it; name another file")
    _demand_writable(path.parent, option)  # where the new file gets its name
    return path


def is_output(path: Path) -> bool:
    """Whether a command has written this file, which has the mark then."""
    try:
        with path.open("rb") as file:
            head = file.read(ENDS)
            file.seek(max(0, path.stat().st_size - ENDS))
            return MARK.encode() in head or MARK.encode() in file.read(ENDS)
    except OSError:
        return False


def write_output(path: Path, option: str, content: str | bytes) -> None:
    """Write a file that `output_file` has allowed, whole or not at all. `content` has the mark.

    Raises:
        JobError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise JobError(f"{option} {path} cannot be written: {error.strerror}; name another file") from error


def _demand_writable(folder: Path, option: str) -> None:
    """Refuse a folder, there or to be made, if rights are missing or a part of its path is a file."""
    # The rights of the nearest folder that exists decide whether the rest of the path can be made
    existing = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not existing.is_dir():
        raise JobError(f"{option} {folder} cannot be made: {existing} is no folder; name another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise JobError(f"{option} {folder} cannot be written; name another folder")
