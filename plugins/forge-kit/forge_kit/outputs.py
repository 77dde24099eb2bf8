"""Where commands write: never over what is there, and what cannot be written is refused in one sentence."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from forge_core.contracts.errors import JobError


def new_folder(path: Path, option: str) -> Path:
    """A folder for all that a command writes, which is made: it must be new or empty.

    Args:
        path: as the user wrote it; `~` is the home folder.
        option: by which errors name it (`--out`).

    Raises:
        JobError: it has files, is no folder, or cannot be made.
    """
    path = path.expanduser()
    if path.is_dir() and any(path.iterdir()):
        raise JobError(f"{option} {path} is not empty; name a new folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK | os.X_OK)
    except OSError as error:
        raise JobError(f"{option} {path} cannot be made: {error.strerror}; name another folder") from None
    if not writable:
        raise JobError(f"{option} {path} cannot be written; name another folder")
    return path


def output_file(path: Path, option: str, suffixes: Collection[str]) -> Path:
    """A file that a command writes, by whose suffix its format is known.

    Args:
        path: as the user wrote it; `~` is the home folder.
        option: by which errors name it (`--out`).
        suffixes: of the formats (`.png`), in lower case.

    Raises:
        JobError: the suffix is another, or the file cannot be written there.
    """
    path = path.expanduser()
    if path.suffix.lower() not in suffixes:
        raise JobError(f"{option} {path}: {path.suffix!r} is no format; end it in {' or '.join(suffixes)}")
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if path.is_dir() or not os.access(existing, os.W_OK):
        raise JobError(f"{option} {path} {'is a folder' if path.is_dir() else 'cannot be written'}; name another file")
    return path
