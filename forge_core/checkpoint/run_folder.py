"""The run folder: its owner, its record of the job, and its checkpoints' storage."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from attrs import asdict, evolve, frozen

from forge_core.checkpoint.storage import MALFORMED, Local, LocalStorage
from forge_core.contracts.data import Tokenizer
from forge_core.contracts.errors import ForgeError, JobError
from forge_core.contracts.run_end import End
from forge_core.contracts.runtime import Storage
from forge_core.files import write_atomically
from forge_core.job import LOCAL_STORAGE, RUN_FILES, Job, JobSection
from forge_core.launch.progress_beacon import report_progress
from forge_core.plugins.catalog import Catalog

PROVENANCE, JOB, METRICS = RUN_FILES
END = "end.json"
LOCK = ".lock"
UNKNOWN = "another process"
TOKENIZER = "tokenizer"
LEASE_S = 120.0
"""Seconds after which network file systems have released the lock of a machine that died (NFS 4: 90)."""


def run_folder(job: Job) -> Path:
    """`{job.output}/{job.name}`."""
    return Path(job.job.output) / job.job.name


# --- its owner ---------------------------------------------------------------------------------------------------

_held: dict[Path, IO[str]] = {}
"""The open lock of each folder that this process owns, by its absolute path."""


def _release_in_child() -> None:
    """A forked process shares the lock: a worker that outlives a killed run would keep its folder locked."""
    for lock in _held.values():
        lock.close()
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)


@contextmanager
def owned(folder: Path, advice: str = "give this run another job.name", patience_s: float = 0) -> Iterator[None]:
    """Own `folder` while this context lasts. A folder that had to be made, and stayed empty, is removed again.

    A `ForgeError` names host and number of another process that owns it; of one on another host, which may have died,
    after `patience_s` seconds.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with _lock(folder, advice, time.monotonic() + patience_s) as lock:
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        _held[folder.absolute()] = lock
        try:
            yield
            lock.truncate(0)  # the lock of a run that died still names it
        finally:
            is_own = not displaced(folder)
            del _held[folder.absolute()]
            if made and is_own and {path.name for path in folder.iterdir()} <= {LOCK, END}:
                # Before the lock is released: afterwards the files may be another process's
                (folder / END).unlink(missing_ok=True)
                (folder / LOCK).unlink()
                with suppress(OSError):  # one of its parents is in use by now
                    for path in made:
                        path.rmdir()


def displaced(folder: Path) -> str:
    """Why this process, which took the lock of `folder`, no longer owns the folder at that path; empty if it does."""
    if (lock := _held.get(folder.absolute())) is None:
        return ""
    with suppress(FileNotFoundError, NotADirectoryError):
        if os.path.samestat(os.stat(folder / LOCK), os.fstat(lock.fileno())):
            return ""
        return f"{folder} was moved or removed while this run used it, and another run has begun there"
    return f"{folder} was moved or removed while this run used it"


def _lock(folder: Path, advice: str, deadline: float) -> IO[str]:
    # A lock of the kernel and not the mere existence of a file: it goes when the process ends, however it ends
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / LOCK).open("a+")  # not "w": the name of an owner that is there must stay readable
        except OSError as error:
            raise JobError.at("job.output", f"{folder} cannot be written: {error.strerror}") from error
        if not _take(lock):
            with lock:
                lock.seek(0)
                user = lock.read().strip() or UNKNOWN
            if user.endswith((f" on {socket.gethostname()}", UNKNOWN)) or time.monotonic() >= deadline:
                raise ForgeError(f"{folder} is in use by {user}; {advice}")
            report_progress(f"waiting for the lock of {folder}, which {user} holds, if it has not died")
            time.sleep(1)
        elif os.fstat(lock.fileno()).st_nlink:
            return lock
        else:
            lock.close()  # its last owner removed it between the two calls


def _take(lock: IO[str]) -> bool:
    """Try more than once: a process that only looks up the owner holds the lock for a moment."""
    for pause in (0.05, 0.1, 0):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(pause)
        else:
            return True
    return False


# --- its records -------------------------------------------------------------------------------------------------


@frozen
class RunFolder:
    """The files of a run. Commands and plugins read and write them by this class alone."""

    path: Path

    def job(self) -> Mapping[str, Any]:
        """The tables of the resolved job; none before the first start. Raises a `JobError` if the file is damaged."""
        try:
            return tomllib.loads((self.path / JOB).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise JobError(f"{self.path / JOB} cannot be read: {error}; the next start writes it again") from error

    def provenance(self) -> dict[str, Any]:
        """Versions, digests of local files, and where the run was started; empty before its first start."""
        return json.loads(path.read_text()) if (path := self.path / PROVENANCE).exists() else {}

    def plan(self) -> str:
        """The summary that its last start printed; empty before the first."""
        return path.read_text() if (path := self.path / "plan.txt").exists() else ""

    def end(self) -> End | None:
        """How its last start ended; None while one is under way, or if that was killed as a whole."""
        try:
            return End.from_dict(json.loads((self.path / END).read_text(encoding="utf-8")))
        except MALFORMED:
            return None

    def write_end(self, end: End, supersede: bool = False) -> None:
        """Keep how a start ended. Without `supersede` its first record stays, as later ends follow from that."""
        if not displaced(self.path) and (supersede or not (self.path / END).exists()):
            write_atomically(self.path / END, json.dumps(asdict(end)) + "\n")

    def remove_end(self) -> None:
        """Forget how an earlier start ended, as the next one begins."""
        (self.path / END).unlink(missing_ok=True)


def refuse_file(path: Path) -> None:
    """Raise a `JobError` if `path` is a file where a run is meant; it names the run of a job, or of a file in one."""
    if path.is_file():
        run = next((folder for folder in path.absolute().parents if (folder / PROVENANCE).is_file()), None)
        hint = f"; its run is {os.path.relpath(run)}" if (run := run or _run_of_job(path)) else ""
        raise JobError(f"{path} is a file, and no run folder or checkpoint{hint}")


def _run_of_job(path: Path) -> Path | None:
    with suppress(*MALFORMED):
        section = JobSection(**tomllib.loads(path.read_text(encoding="utf-8"))["job"])
        return Path(section.output).expanduser() / section.name
    return None


def write_record(folder: Path, job_toml: str, provenance: Mapping[str, Any], plan: str) -> None:
    """Keep the resolved job, the provenance with the folder in which relative paths of the job start, and the plan."""
    # First, as a folder that has it is known to be a run's
    (folder / PROVENANCE).write_text(json.dumps({**provenance, "started_in": os.getcwd()}, indent=1) + "\n")
    (folder / JOB).write_text(job_toml)
    (folder / "plan.txt").write_text(plan + "\n")


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Keep the tokenizer with the run, once."""
    if not (folder / TOKENIZER).is_dir():
        # Renamed when it is whole: every later start takes the folder as it is
        unfinished = folder / f"{TOKENIZER}.tmp"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        tokenizer.save(unfinished)
        unfinished.rename(folder / TOKENIZER)


def _plugins_build_storage(folder: Path) -> bool:
    """Whether a plugin of the run has a say in what its storage is; one that is not installed has none."""
    for table in RunFolder(folder).job().get("plugins", {}).values():
        with suppress(ForgeError):
            if "forge_build_storage" in dir(Catalog.installed().load("plugin", table["type"])):
                return True
    return False


def storage_of(folder: Path) -> Storage:
    """The storage that keeps the checkpoints of a run folder, as specified by the job in the folder.

    Raises a `JobError` if the folder is a file or its job names something that is not installed, and a `ForgeError` if
    the storage cannot be built.
    """
    refuse_file(folder)
    table = RunFolder(folder).job().get("checkpoint", {}).get("storage", {})
    # The core's own is opened without the job, whose plugins need not be installed to look at its checkpoints
    if table.get("type", LOCAL_STORAGE) == LOCAL_STORAGE and not _plugins_build_storage(folder):
        return LocalStorage(folder / table.get("folder", Local().folder))
    import torch

    from forge_core.config.load import parse_job
    from forge_core.contracts.layout import Layout
    from forge_core.parallel.initialise import bare_context

    catalog = Catalog.installed()
    job = parse_job((folder / JOB).read_text(), str(folder / JOB), catalog, ("checkpoint", "plugins"))
    context = evolve(bare_context(job, Layout(), catalog, torch.device("cpu")), folder=folder)
    return context.build(job.checkpoint.storage)
