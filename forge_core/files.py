"""Files that are whole at every moment, whoever reads them and whenever this process is killed."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file aside and rename it, so that `path` is the old file or the new one, and never a part of one.

    Its folder must exist. Several processes may write the same file: the last rename counts.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
