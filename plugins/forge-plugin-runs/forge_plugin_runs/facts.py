"""Facts about run folders, read from their files without torch, whatever state a run is in."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from attrs import asdict, frozen

from forge_core.checkpoint.run_folder import JOB, LOCK, PROVENANCE, RunFolder, refuse_file, storage_of
from forge_core.checkpoint.storage import read_manifest
from forge_core.contracts.errors import CheckpointError, ExitCode, ForgeError, JobError
from forge_core.contracts.run_end import End
from forge_core.files import lines_from_end
from forge_core.job import METRICS
from forge_kit.tools.run_owner import metrics_file, owner
from forge_plugin_runs.life import LINES, START_S, Pulse, pulse_of

State = Literal["running", "finished", "stopped", "died", "imported"]
STATES: Mapping[State, str] = {
    "running": "a process owns the folder",
    "finished": "the checkpoint of train.steps is there, or a hook has ended the run for good",
    "stopped": "ended by request before train.steps, everything saved, or before the first step",
    "died": "ended by an error or a kill; a later start continues from the newest checkpoint",
    "imported": "was never trained here: weights of another program",
}
DEPTH = 4
"""Levels of folders that are searched for runs."""
LOOK = 1 << 22
"""Bytes from the end of the metrics in which the last evaluation is looked for."""
STATE_OF: Mapping[int, State] = {ExitCode.FINISHED: "finished", ExitCode.STOPPED: "stopped"}
"""State of a run by the exit code of its end; of all others it died."""


@frozen(kw_only=True)
class RunFacts:
    """A run as its folder shows it."""

    folder: Path
    state: State
    pulse: Pulse | None
    """Signs of life of a run that is running; None of others."""
    owner: str
    """Process and host that own the folder now; of a run that died, those that did."""
    step: int
    """Last step in the metrics, or of the newest checkpoint."""
    steps: int | None
    """`train.steps` of its job; None where the folder has none yet."""
    loss: float | None
    evaluation: Mapping[str, float]
    """Metrics of the last evaluation."""
    evaluated: int | None
    """Its step."""
    tokens: int | None
    """Positions fed."""
    updated: float
    """When its files last changed, in seconds since 1970."""
    size: int
    """Bytes of all files in the folder."""
    checkpoints: Sequence[int]
    """Steps of its checkpoints."""
    ended: str
    """Why a hook has ended the run for good (`request_stop(final=True)`); empty if none has."""
    end: End | None
    """How its last start ended; None of one that runs, or was killed as a whole."""
    last_line: Mapping[str, Any]
    """The last line of a step; empty without one."""
    problem: str
    """Reason why a part could not be read; empty if there is none."""

    @property
    def held_out(self) -> float | None:
        """The loss of the last evaluation: `eval/loss`, or else the first metric that ends in `loss`."""
        named = {name: value for name, value in self.evaluation.items() if name.endswith("loss")}
        return named.get("eval/loss", next(iter(named.values()), None))

    def facts(self) -> dict[str, Any]:
        """The same as plain types, for JSON."""
        return {
            "run": str(self.folder),
            "state": self.state,
            "life": self.pulse.life if self.pulse else None,
            "last_line_s": self.pulse.age_s if self.pulse else None,
            "step_s": self.pulse.step_s if self.pulse else None,
            "owner": self.owner,
            "step": self.step,
            "steps": self.steps,
            "loss": finite(self.loss),
            "held_out_loss": finite(self.held_out),
            "evaluation": {name: finite(value) for name, value in self.evaluation.items()},
            "evaluated": self.evaluated,
            "tokens": self.tokens,
            "updated": self.updated,
            "size": self.size,
            "checkpoints": list(self.checkpoints),
            "ended": self.ended,
            "end": asdict(self.end) if self.end else None,
            "problem": self.problem,
        }


def is_run(folder: Path) -> bool:
    """Whether a folder is a run folder: it has a job and its record, or has an owner before they are written."""
    return (folder / LOCK).is_file() or ((folder / JOB).is_file() and (folder / PROVENANCE).is_file())


def find_runs(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yields the run folders below `folder`, or itself, in the order of their names; links are not followed."""
    # Not searched any further: a run folder may have thousands of files
    if is_run(folder):
        yield folder
    elif depth:
        with suppress(PermissionError), os.scandir(folder) as entries:
            below = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
            for name in below:
                yield from find_runs(folder / name, depth - 1)


def demand_run(folder: Path) -> Path:
    """Returns `folder` if it is a run folder; raises a `JobError` that describes what it is instead."""
    if is_run(folder):
        return folder
    refuse_file(folder)
    if not folder.is_dir():
        near = folder.parent if folder.parent.is_dir() else Path()
        names = ", ".join(str(run) for run in list(find_runs(near, 2))[:8])
        raise JobError(f"{folder}: no such run folder{f'; there are {names}' if names else ''}")
    runs = list(find_runs(folder))
    inside = f"; runs in it: {', '.join(map(str, runs[:8]))}" if runs else ""
    raise JobError(f"{folder} is no run folder: it has no {JOB} of a run{inside}")


def read_run(folder: Path) -> RunFacts:
    """Reads the facts of a run folder. Files that are damaged or missing leave facts out, and are its `problem`."""
    problems: list[str] = []
    table = _job_table(folder, problems)
    user, lock = owner(folder), folder / LOCK
    checkpoints = _checkpoints(folder, problems)
    metrics = metrics_file(folder) if table else folder / METRICS
    # Of a run that is running again, the file still has the end of an earlier start
    end = None if user else RunFolder(folder).end()
    trained, logged = last_records(metrics)
    evaluated = logged or _saved_evaluation(folder, checkpoints)
    metrics_of = {name: number(value) for name, value in evaluated.items() if name != "step"}
    newest, steps = checkpoints[-1] if checkpoints else 0, table.get("train", {}).get("steps")
    last = lock.read_text().strip() if lock.is_file() and not user else ""
    ended = str(manifest_of(folder, newest).get("ended", "")) if checkpoints else ""
    return RunFacts(
        folder=folder,
        # A hook may have ended the run for good before `train.steps`: its newest checkpoint is then the last one
        state=_state(user, last, lock.is_file(), newest if checkpoints else None, newest if ended else steps, end),
        pulse=read_pulse(folder, table) if user else None,
        owner=user or last,
        step=max(int(trained.get("step", 0)), newest),
        steps=steps,
        loss=number(trained.get("loss")),
        evaluation={name: value for name, value in metrics_of.items() if value is not None},
        evaluated=evaluated.get("step"),
        tokens=trained.get("tokens"),
        # The folder is among them, so that there is always one
        updated=max(_modified([metrics, folder / JOB, lock, folder])),
        size=size_of(folder),
        checkpoints=checkpoints,
        ended=ended,
        end=end,
        last_line=trained,
        problem="; ".join(problems),
    )


def _state(user: str, last: str, locked_once: bool, newest: int | None, steps: int | None, end: End | None) -> State:
    if user:
        return "running"
    if not locked_once:
        return "imported"
    # What the run recorded comes first: its files alone leave the reason open
    if end is not None:
        return STATE_OF.get(end.code, "died")
    if newest is not None and steps is not None and newest >= steps:
        return "finished"
    # A run that ends in order, also by request, clears its name in the lock.
    return "died" if last or newest is None else "stopped"


def _job_table(folder: Path, problems: list[str]) -> Mapping[str, Any]:
    try:
        return RunFolder(folder).job()
    except JobError as error:
        problems.append(str(error))
        return {}


def _checkpoints(folder: Path, problems: list[str]) -> list[int]:
    try:
        return list(storage_of(folder).steps())
    except (ForgeError, OSError, ValueError, KeyError) as error:
        problems.append(f"its checkpoints: {error}")
        return []


def _saved_evaluation(folder: Path, steps: Sequence[int]) -> Mapping[str, Any]:
    """The evaluation that the newest readable checkpoint keeps."""
    for step in reversed(steps):
        # A damaged checkpoint is passed over, since an older one has an evaluation too
        with suppress(ForgeError, OSError):
            kept = read_manifest(storage_of(folder).path(step)).get("evaluation")
            if isinstance(kept, dict) and kept.get("metrics"):
                return {**kept["metrics"], "step": kept["step"]}
    return {}


def manifest_of(folder: Path, step: int) -> Mapping[str, Any]:
    """Returns the manifest of a run's checkpoint; empty if it cannot be read."""
    try:
        return read_manifest(storage_of(folder).path(step))
    except (CheckpointError, OSError):
        return {}


def last_records(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the last line of a step and the last line of an evaluation in a file of metrics.

    Empty if it has none in its last `LOOK` bytes: a run without evaluations may have millions of lines.
    """
    trained: dict[str, Any] = {}
    evaluated: dict[str, Any] = {}
    for line in _lines_backwards(path, LOOK):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the last line may be on its way to the file
        if not isinstance(record, dict) or "step" not in record:
            continue
        if "loss" in record:
            # Read from the end: the first of each kind is the last in the file
            trained = trained or record
        else:
            evaluated = evaluated or record
        if trained and evaluated:
            break
    return trained, evaluated


def read_pulse(folder: Path, table: Mapping[str, Any]) -> Pulse:
    """Returns the signs of life of a run that owns its folder; `table` is its job."""
    start_s = float(table.get("launch", {}).get("start_timeout_s", START_S))
    # The owner has written its name into the lock as it started
    started = next(_modified([folder / LOCK]), None)
    records = newest_records(metrics_file(folder), LINES)
    return pulse_of(records, now=time.time(), started=started, start_s=start_s)


def newest_records(path: Path, count: int) -> list[dict[str, Any]]:
    """Returns the last lines of a file of metrics in order, at most `count`; those that cannot be read are left out."""
    records: list[dict[str, Any]] = []
    for line in itertools.islice(_lines_backwards(path), count):
        with suppress(ValueError):
            record = json.loads(line)
            records += [record] if isinstance(record, dict) and "step" in record else []
    return records[::-1]


def _lines_backwards(path: Path, most: int = sys.maxsize) -> Iterator[bytes]:
    """Yields the lines of a file, the last first, and reads no more of it than is asked for, or about `most` bytes."""
    with suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        for start, line in lines_from_end(file):
            if size - start > most + len(line):
                return
            if line:
                yield line


def number(value: Any) -> float | None:
    """A number of the metrics, in which those that are not finite are strings."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def finite(value: float | None) -> float | str | None:
    """A number as JSON can hold it: one that is not finite as a string, as in the metrics."""
    return str(value) if value is not None and not math.isfinite(value) else value


def _modified(paths: Iterable[Path]) -> Iterator[float]:
    for path in paths:
        with suppress(OSError):
            yield path.stat().st_mtime


def size_of(path: Path) -> int:
    """Returns the bytes of a file, or of all files below a folder."""
    if not path.is_dir():
        return path.stat().st_size
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):  # a running job may delete it meanwhile
                total += os.lstat(os.path.join(folder, name)).st_size
    return total
