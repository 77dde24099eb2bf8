"""`forge-run submit --status`: the queue, the attempts and the step of a run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from forge_core.checkpoint.run_folder import RunFolder, refuse_file
from forge_core.contracts.errors import ExitCode, JobError
from forge_kit.tools.json_output import print_json
from forge_kit.tools.run_owner import owner
from forge_kit.tools.tables import columns
from forge_plugin_launch.slurm import scheduler
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

SHOWN = 20
"""Attempts that are shown, the last ones."""


def print_status(run: Path, *, is_json: bool = False) -> int:
    """Print the status of a run that was submitted; needs neither the queue nor a running job."""
    refuse_file(run)
    if not run.is_dir():
        raise JobError(f"{run}: no such run folder")
    submission, attempts = read_json(run / FOLDER / SUBMISSION), read_attempts(run)
    if not submission and not attempts:
        raise JobError(f"{run} was not submitted by `forge-run submit`: it has no {FOLDER}/{SUBMISSION}")
    job = submission.get("job", attempts[-1].job if attempts else "")
    under_way = read_json(run / FOLDER / CURRENT)
    every = [*attempts, *([attempt_of(under_way)] if under_way else [])]
    if is_json:
        print_json(_facts(run, job, every))
        return ExitCode.FINISHED
    print(columns([*_summary(run, job, attempts)]))
    if every:
        rows = [["attempt", "job", "nodes", "began", "lasted", "steps", "code", "end"]]
        numbered = list(enumerate(every, start=1))
        print("\n" + columns(rows + [_row(number, attempt) for number, attempt in numbered[-SHOWN:]]))
    return ExitCode.FINISHED


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
