"""The account of a run from the files in its folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from forge_core.checkpoint.run_folder import JOB, RunFolder, refuse_file
from forge_core.contracts.errors import JobError
from forge_core.job import METRICS
from forge_kit.tools.run_owner import metrics_file, owner
from forge_plugin_resilience.goodput.accounting import Account, account_of
from forge_plugin_resilience.goodput.events import EVENTS, read_events, whole_lines
from forge_plugin_resilience.goodput.failure_rate import GPU_YEARS, LONGEST_S

ATTEMPTS = "attempts.jsonl"
"""By forge-plugin-launch."""


@frozen(kw_only=True)
class StepLines:
    """The account of a run without events, from `metrics.jsonl`: for each step, the start that made it last."""

    steps: int
    began: float
    """End of the first step, less its own time."""
    ended: float
    productive: float
    """Seconds of steps without waits for data."""
    data: float
    """Seconds in which the slowest rank waited for data."""

    @property
    def rest(self) -> float:
        """Seconds of all that is not in steps: saves, evaluations, lost work, restarts, time in which nothing ran."""
        return self.ended - self.began - self.productive - self.data


@frozen(kw_only=True)
class RunAccount:
    """The known facts about a run's time."""

    folder: Path
    running: bool
    steps: int | None
    """`train.steps`; None where the folder does not say."""
    account: Account | None
    """By its events; None where there are none."""
    lines: StepLines | None
    """By its metrics; None where no line has a time."""
    attempts: Sequence[dict[str, Any]]
    """Lines of `attempts.jsonl`."""
    gpu_years: float
    """Years of one rank between failures, as `[hooks.interval]` of the job has them, or its default."""
    longest_s: float
    """Upper bound of the interval of saves, likewise."""


def read_run(folder: Path) -> RunAccount:
    """Read the account of a run.

    Raises:
        JobError: the folder is no run folder, or none of its files has times.
    """
    refuse_file(folder)
    if not folder.is_dir() or not any((folder / name).is_file() for name in (JOB, EVENTS, METRICS)):
        raise JobError(f"{folder} is no run folder: it has none of {JOB}, {EVENTS} and {METRICS}")
    running = bool(owner(folder))
    table = _job_table(folder)
    attempts = _records(folder / ATTEMPTS)
    events = list(read_events(folder / EVENTS))
    now = time.time() if running else None
    has_start = any(event.get("event") == "start" for event in events)
    account = account_of(events, slurm=attempts, now=now, end=RunFolder(folder).end()) if has_start else None
    # Without a readable job, only the default name of the file is known
    lines = _step_lines(metrics_file(folder) if table else folder / METRICS)
    if account is None and lines is None:
        raise JobError(f"{folder}: no {EVENTS} (add [hooks.goodput]), and no line of {METRICS} has a time")
    steps = table.get("train", {}).get("steps")
    hooks: dict[str, Any] = table.get("hooks", {})
    interval: dict[str, Any] = next((hook for hook in hooks.values() if _is_interval(hook)), {})
    return RunAccount(
        folder=folder,
        running=running,
        steps=steps,
        account=account,
        lines=lines,
        attempts=attempts,
        gpu_years=float(interval.get("gpu_years", GPU_YEARS)),
        longest_s=60 * float(interval.get("longest_minutes", LONGEST_S / 60)),
    )


def _is_interval(hook: dict[str, Any]) -> bool:
    # Resolved jobs name types with their distribution
    return str(hook.get("type", "")).rpartition("/")[2] == "interval"


def _job_table(folder: Path) -> dict[str, Any]:
    try:
        return dict(RunFolder(folder).job())
    except JobError:
        return {}


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            return list(whole_lines(file))
    except FileNotFoundError:
        return []


def _step_lines(path: Path) -> StepLines | None:
    steps, began, ended, productive, data = 0, 0.0, 0.0, 0.0, 0.0
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        for record in whole_lines(file):
            if "loss" not in record or "time" not in record or "step_seconds" not in record:
                continue
            seconds = float(record["step_seconds"])
            # A line is written at the end of its step
            began = began or record["time"] - seconds
            ended = max(ended, record["time"])
            waited = seconds * min(1.0, float(record.get("data_wait", 0.0)))
            steps, productive, data = steps + 1, productive + seconds - waited, data + waited
    return StepLines(steps=steps, began=began, ended=ended, productive=productive, data=data) if steps else None
