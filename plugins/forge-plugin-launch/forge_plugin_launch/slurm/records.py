"""Files of a run folder about its SLURM jobs: attempts, the submission, and the progress of the attempt under way."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, fields, frozen

from forge_core.contracts.errors import JobError
from forge_core.files import write_atomically
from forge_kit.tools.run_owner import metrics_file

FOLDER = "slurm"
"""Folder below the run folder for all of these but the attempts."""
SCRIPT = "submit.sh"
ATTEMPTS = "attempts.jsonl"
CURRENT = "current.json"
PROGRESS = "progress.json"
SUBMISSION = "submission.json"
METRICS_TAIL = 1 << 16
"""Bytes of metrics.jsonl that are read, from the end, to find the last step."""


@frozen(kw_only=True)
class SlurmAttempt:
    """One start of a SLURM job, from its batch script's begin to its end: a line of `attempts.jsonl`."""

    job: str
    restart: int = 0
    """`SLURM_RESTART_COUNT`."""
    nodes: str = ""
    """In SLURM's short form: `gpu[01-08]`."""
    began: float
    """Seconds since 1970."""
    ended: float = 0.0
    code: int | None = None
    """Exit code of srun; None if the batch script was killed before it could note one."""
    step_began: int | None = None
    """Completed steps when training began; None if it did not begin."""
    step_ended: int | None = None
    saved: int | None = None
    """Step of the newest checkpoint at the end."""
    kind: str = ""
    """`finished`, `preempted`, `time`, `failed`, `node`, `cancelled`, `stopped`, `bad job` or `non-finite`."""
    reason: str = ""
    """The same in words, and what was done."""
    action: str = ""
    """`queued again`, `held` or `ended`."""
    error: str = ""
    """First error, in one line."""
    error_step: int | None = None
    blamed: tuple[str, ...] = ()
    """Nodes on which it failed, if the machine may be the cause."""
    excluded: tuple[str, ...] = ()
    """Nodes that later attempts leave out because of this one."""
    log: str = ""

    @property
    def progressed(self) -> bool:
        """Whether a checkpoint was made in this attempt."""
        return self.saved is not None and self.saved > (self.step_began or 0)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the table in a file; empty if there is none, or it is not whole."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def write_json(path: Path, table: Mapping[str, Any]) -> None:
    """Write a file that is whole at every moment: it is read after kills."""
    write_atomically(path, json.dumps(table) + "\n")


def attempt_of(table: Mapping[str, Any]) -> SlurmAttempt:
    """Returns the attempt that a line describes; keys of a later version are left out."""
    known = {each.name for each in fields(SlurmAttempt)}
    facts: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in table.items() if key in known
    }
    return SlurmAttempt(**facts)


def read_attempts(run: Path) -> list[SlurmAttempt]:
    """Returns the attempts of a run that have ended, the first one first."""
    try:
        lines = (run / ATTEMPTS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    attempts = []
    for line in lines:
        try:
            attempts.append(attempt_of(json.loads(line)))
        except (ValueError, TypeError):
            continue  # half a line, of a machine that died while it was written
    return attempts


def append_attempt(run: Path, attempt: SlurmAttempt) -> None:
    """Add a line to `attempts.jsonl`, on the disk before this returns: SLURM may kill this process next."""
    with (run / ATTEMPTS).open("a+b") as file:
        # Half a line, of a machine that died while it was written, would make this one unreadable too
        half = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
        file.write((b"\n" if half else b"") + json.dumps(asdict(attempt)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def excluded_nodes(attempts: Iterable[SlurmAttempt]) -> list[str]:
    """Returns the nodes that attempts of a run have left out, in their order."""
    return list(dict.fromkeys(node for attempt in attempts for node in attempt.excluded))


def last_metrics(run: Path) -> Mapping[str, Any]:
    """Returns the last line of a training step in `metrics.jsonl`; empty if there is none."""
    try:
        with metrics_file(run).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - METRICS_TAIL))
            lines = file.read().splitlines()
    except (OSError, JobError):
        return {}
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # on its way to the file, or cut off by the seek
        if isinstance(record, dict) and "loss" in record:
            return record
    return {}
