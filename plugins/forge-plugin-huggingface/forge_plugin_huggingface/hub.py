"""Shared by datasets and tokenizers: paths, and errors of the libraries that read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from forge_core.contracts.errors import JobError, Problem


def local_problem(path: str) -> str | None:
    """Returns the problem of a `path` that can only be a folder on disk; names on the hub look like `owner/name`."""
    folder = Path(path)
    if not path:
        return "names nothing; give a folder, or the name of a repository on the hub"
    if folder.is_file():
        return f"{path!r} is a file; give the folder that it lies in"
    names_a_folder = path.startswith(("/", ".", "~")) or path.count("/") > 1
    if names_a_folder and not folder.is_dir():
        return f"{path!r} does not exist (looked from {Path.cwd()}); correct the path"
    return None


def expanded(path: str) -> str:
    """Returns the absolute path of a folder, which is no valid name on the hub or of a format; else the name."""
    folder = Path(path)
    return str(folder.resolve()) if folder.is_dir() else path


@contextmanager
def explained(path: str, key: str = "path") -> Iterator[None]:
    """A context in which any exception becomes a `JobError` that names the path and how it was tried.

    The libraries raise a dozen classes of errors, including the errors of HTTP clients and parsers.
    """
    try:
        yield
    except JobError:
        raise
    except Exception as error:
        # On one line: errors of HTTP clients have several
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, StopIteration):  # by `datasets`, which infers columns from the first row
            reason = "its files have no rows"
        raise JobError([Problem(key, f"{path!r} cannot be used ({reason}); {_tried(path)}")]) from error


@contextmanager
def offline() -> Iterator[None]:
    """A context in which the libraries read their cache of the hub and use no network."""
    from huggingface_hub import constants

    # Both libraries look at this constant, which is read from the environment once
    with patch.object(constants, "HF_HUB_OFFLINE", True):
        yield


def _tried(path: str) -> str:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    folder = Path(path)
    if folder.is_dir():
        return f"it was read from the folder {folder.resolve()}"
    tried = f"there is no folder {folder.absolute()}, so it is a name on the hub"
    if HF_HUB_OFFLINE:
        return f"{tried}, which was not asked because HF_HUB_OFFLINE is set; unset it, or give a local folder"
    return f"{tried}; check the name, the network and, for private repositories, HF_TOKEN, or give a local folder"
