"""The run folder: who owns it, and what is kept in it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.errors import ForgeError

if TYPE_CHECKING:
    from forge_core.config.job import Job
    from forge_core.protocols import Tokenizer

LOCK = ".lock"
TOKENIZER = "tokenizer"


def run_folder(job: Job) -> Path:
    """`{job.output}/{job.name}`."""
    return Path(job.job.output) / job.job.name


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Own `folder` while this context lasts. The kernel drops the lock when the process ends, however it ends.

    Raises:
        ForgeError: another process owns it; names its host and number.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            raise ForgeError(f"{folder} is in use by {owner}; give this run another job.name") from error
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        yield


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Keep the tokenizer with the run, once."""
    if not (folder / TOKENIZER).is_dir():
        unfinished = folder / f"{TOKENIZER}.tmp"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        tokenizer.save(unfinished)
        unfinished.rename(folder / TOKENIZER)


def write_record(folder: Path, job_toml: str, provenance: Mapping[str, Any], plan: str) -> None:
    """Keep the resolved job, the provenance and the plan."""
    (folder / "job.toml").write_text(job_toml)
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n")
    (folder / "plan.txt").write_text(plan + "\n")
