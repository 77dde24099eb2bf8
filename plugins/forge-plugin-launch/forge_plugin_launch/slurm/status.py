"""`forge-run submit --status`: the queue, the attempts and the step of a run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from forge_core.checkpoint.run_folder import RunFolder, refuse_file
from forge_core.contracts.errors import JobError
from forge_kit.tools.json_output import print_json
from forge_kit.tools.run_owner import owner
from forge_kit.tools.tables import columns
from forge_plugin_launch.clusters import State, Status
from forge_plugin_launch.slurm import scheduler
from forge_plugin_launch.slurm.decision import ENDED
from forge_plugin_launch.slurm.records import (
    CURRENT,
    FOLDER,
    SUBMISSION,
    SlurmAttempt,
    attempt_of,
    last_metrics,
    read_attempts,
    read_json,
)
from forge_plugin_launch.slurm.scheduler import SlurmError

ENDS: Mapping[str, State] = {"finished": "finished", "stopped": "stopped", "cancelled": "stopped"}
"""States of kinds of end after which a run is not queued again; others have failed."""
SHOWN = 20
"""Attempts that are shown, the last ones."""


def print_status(run: Path, *, is_json: bool = False) -> None:
    """Print the status of a run that was submitted; needs neither the queue nor a running job."""
    submission, attempts = _submitted(run)
    job = submission.get("job", attempts[-1].job if attempts else "")
    under_way = read_json(run / FOLDER / CURRENT)
    every = [*attempts, *([attempt_of(under_way)] if under_way else [])]
    if is_json:
        print_json(_facts(run, job, every))
        return
    print(columns([*_summary(run, job, attempts)]))
    if every:
        rows = [["attempt", "job", "nodes", "began", "lasted", "steps", "code", "end"]]
        numbered = list(enumerate(every, start=1))
        print("\n" + columns(rows + [_row(number, attempt) for number, attempt in numbered[-SHOWN:]]))


def state_of(run: Path) -> Status:
    """Returns what has become of a run, by the queue and its attempts.

    Raises:
        JobError: it was not submitted.
    """
    submission, attempts = _submitted(run)
    job = submission.get("job", attempts[-1].job if attempts else "")
    queue = _queue(job)
    # Written by the batch script, so that a queue that does not answer hides no running job
    if read_json(run / FOLDER / CURRENT):
        return Status(state="running", words=queue, id=job)
    # After a failure of its node the script has not noted the end, and the next start does
    last = attempts[-1] if attempts else None
    if last is None:
        return Status(state="queued", words=queue, id=job)
    state = ENDS.get(last.kind, "failed") if last.action == ENDED else "recovering"
    return Status(state=state, words=last.reason, id=job)


def _submitted(run: Path) -> tuple[Mapping[str, Any], list[SlurmAttempt]]:
    """The submission of a run, and its attempts."""
    refuse_file(run)
    if not run.is_dir():
        raise JobError(f"{run}: no such run folder")
    submission, attempts = read_json(run / FOLDER / SUBMISSION), read_attempts(run)
    if not submission and not attempts:
        raise JobError(f"{run} was not submitted by `forge-run submit`: it has no {FOLDER}/{SUBMISSION}")
    return submission, attempts


def _facts(run: Path, job: str, attempts: Sequence[SlurmAttempt]) -> dict[str, Any]:
    """What `--json` prints: the summary, and all attempts, of which the last one may be under way."""
    record = last_metrics(run)
    return {
        "run": run,
        "job": job,
        "queue": _queue(job),
        "step": record.get("step"),
        "steps": _steps(run),
        "loss": record.get("loss"),
        "owner": owner(run) or "",
        "attempts": [attrs.asdict(attempt) | {"ended": attempt.ended or None} for attempt in attempts],
    }


def _summary(run: Path, job: str, attempts: Sequence[SlurmAttempt]) -> Iterator[Sequence[str]]:
    record, steps = last_metrics(run), _steps(run)
    yield "run", str(run)
    yield "job", f"{job}: {_queue(job)}"
    if record:
        of = f" of {steps:,}" if steps else ""
        yield "step", f"{record['step']:,}{of}, loss {record['loss']:.4f}"
    else:
        yield "step", "none yet"
    if user := owner(run):
        yield "trains", user
    if attempts:
        last = attempts[-1]
        yield "last end", f"{last.reason}; {last.action}"
        if last.log:
            yield "log", last.log


def _queue(job: str) -> str:
    if shutil.which("squeue") is None:
        return "unknown here, where there is no squeue"
    try:
        return scheduler.queue_state(job) or "not in the queue"
    except SlurmError as error:
        return f"unknown: {error}"


def _steps(run: Path) -> int | None:
    try:
        return RunFolder(run).job()["train"]["steps"]
    except (JobError, KeyError):
        return None  # it has not begun


def _row(number: int, attempt: SlurmAttempt) -> list[str]:
    began = time.strftime("%m-%d %H:%M", time.localtime(attempt.began))
    seconds = (attempt.ended or time.time()) - attempt.began
    lasted = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else _hours(seconds)
    steps = "" if attempt.step_began is None else f"{attempt.step_began} to {attempt.step_ended}"
    code = "" if attempt.code is None else str(attempt.code)
    end = f"{attempt.kind}, {attempt.action}" if attempt.action else "under way"
    return [str(number), f"{attempt.job}.{attempt.restart}", attempt.nodes, began, lasted, steps, code, end]


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h"
