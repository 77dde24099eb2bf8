"""The state of a run in `forge-run watch`, from the lines that it has read so far."""

from __future__ import annotations

import itertools
import json
import time
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from forge_core.checkpoint.run_folder import LOCK, RunFolder
from forge_core.contracts.errors import JobError
from forge_core.job import METRICS
from forge_kit.tools.run_owner import metrics_file, owner
from forge_plugin_runs.facts import number, read_run
from forge_plugin_runs.life import LINES, START_S, Pulse, pulse_of
from forge_plugin_runs.watch.follow import FollowedFile
from forge_plugin_runs.watch.remote import RemoteLines

PACE = 200
"""Number of recent steps from whose pace the remaining time is estimated."""
RESTART = 100.0
"""Multiple of the median step time above which a pause counts as the time between two starts of the run."""


class WatchedRun(ABC):
    """A run: its lines so far, and whether it moves."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.job: Mapping[str, Any] = {}
        self.steps: dict[int, Mapping[str, Any]] = {}
        """Lines of steps, in order."""
        self.evaluations: dict[int, Mapping[str, Any]] = {}
        self.logs: dict[str, tuple[float, str]] = {}
        """Last line of each rank's log and when it was written."""
        self.state = ""
        """`running`, or how it ended."""
        self.started: float | None = None
        self.ending = ""
        """Why it ended; empty while it runs."""
        self.problem = ""

    @abstractmethod
    def poll(self) -> None:
        """Take in the data that has arrived since the last call."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections."""

    @property
    @abstractmethod
    def now(self) -> float:
        """Present time by the clock of the run's machine."""

    def take(self, line: bytes) -> None:
        """Take in a line of metrics. One of an earlier step than the last is of a run that continued from there."""
        try:
            record = json.loads(line)
            step = int(record["step"])
        except (ValueError, KeyError, TypeError):
            return  # half a line
        record.pop("counts", None)  # much, and not shown
        if "loss" in record:
            _forget(self.steps, step)
            _forget(self.evaluations, step)
            self.steps[step] = record
        else:
            # Later ones only: evaluations of the same step are merged
            _forget(self.evaluations, step + 1)
            self.evaluations[step] = {**self.evaluations.get(step, {}), **record}  # several evaluations, a line each

    @property
    def total(self) -> int | None:
        """`train.steps`."""
        return self.job.get("train", {}).get("steps")

    @property
    def step(self) -> int:
        """The last step in the lines so far; 0 before the first."""
        return next(reversed(self.steps), 0)

    @property
    def last(self) -> Mapping[str, Any]:
        """The last line of a step; empty before the first."""
        return self.steps.get(self.step, {})

    @property
    def pulse(self) -> Pulse | None:
        """Signs of life; None of a run that is known not to run."""
        if self.state not in ("running", ""):
            return None
        start_s = float(self.job.get("launch", {}).get("start_timeout_s", START_S))
        newest = (itertools.islice(reversed(table.values()), LINES) for table in (self.steps, self.evaluations))
        # By time, as lines of steps and of evaluations alternate
        lines = sorted(itertools.chain(*newest), key=lambda line: line.get("time", 0.0))
        return pulse_of(lines, now=self.now, started=self.started, start_s=start_s)

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Returns steps and values of a number, from lines of steps or of evaluations."""
        rows = [*self.steps.items(), *self.evaluations.items()]
        points = [(float(step), value) for step, line in rows if (value := number(line.get(name))) is not None]
        return [x for x, _ in points], [y for _, y in points]

    @property
    def left_s(self) -> float | None:
        """Seconds to the last step by the pace of the last ones, evaluations and saves included; None if not known."""
        lines = list(itertools.islice(reversed(self.steps.values()), PACE))
        times = [float(line["time"]) for line in lines if "time" in line]
        if self.total is None or len(times) < 2:
            return None
        pauses = [later - earlier for later, earlier in itertools.pairwise(times)]
        usual = median(pauses)
        # Without the time between two starts, in which nothing was computed
        kept = [pause for pause in pauses if pause <= max(RESTART * usual, 600.0)]
        return max(0, self.total - self.step) * sum(kept) / max(1, len(kept))


def _forget(lines: dict[int, Mapping[str, Any]], step: int) -> None:
    """Remove the lines from a step on."""
    # Lines are kept in the order of their steps, so that those to remove are at the end
    while lines and (last := next(reversed(lines))) >= step:
        del lines[last]


class LocalRun(WatchedRun):
    """A run in a folder of this machine, or of a file system that it has mounted."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self._file: FollowedFile | None = None

    @property
    def now(self) -> float:
        """This machine's clock, also where another machine that shares the folder writes the lines."""
        return time.time()

    def poll(self) -> None:
        """Reads job, new lines, lock and logs; once nobody owns the folder, how the run ended."""
        self._read_job()
        metrics = self._metrics_file()
        # A job that is written after the first look may name another file
        if self._file is None or self._file.path != metrics:
            self.close()
            self._file = FollowedFile(metrics)
        for line in self._file.lines():
            self.take(line)
        is_running = bool(owner(self._folder))
        if is_running:
            self.state, self.ending = "running", ""
            self.started = (self._folder / LOCK).stat().st_mtime
        # Once: facts of a run that has ended do not change, and reading them takes many files
        elif self.state in ("running", ""):
            run = read_run(self._folder)
            self.state = run.state
            self.ending = run.end.reason if run.end else ""
        for path in sorted(self._folder.glob("logs/rank-*.log")):
            # A log is opened only when it has changed: there may be hundreds
            if (written := path.stat().st_mtime) != self.logs.get(path.stem, (0.0, ""))[0]:
                self.logs[path.stem] = written, _last_line(path)

    def _metrics_file(self) -> Path:
        return metrics_file(self._folder) if self.job else self._folder / METRICS

    def _read_job(self) -> None:
        # Only a start writes another job, and a run that starts was not running before
        if self.job and self.state == "running":
            return
        try:
            self.job = RunFolder(self._folder).job()
        except JobError:
            return  # it is being written

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class RemoteRun(WatchedRun):
    """A run on another host."""

    def __init__(self, host: str, folder: str, *, once: bool = False) -> None:
        super().__init__(f"{host}:{folder}")
        self._lines = RemoteLines(host, folder, once=once)
        self._ahead = 0.0  # seconds by which the host's clock is ahead
        self._toml: list[str] = []  # lines of the job, which come before the first other message

    @property
    def now(self) -> float:
        """The host's clock, by the difference that the script's last message showed."""
        return time.time() + self._ahead

    def poll(self) -> None:
        """Takes what the script has sent: lines of metrics, and its messages, which begin with `@`."""
        for line in self._lines.lines():
            if line.startswith(b"@"):
                self._note(*line.decode(errors="replace")[1:].split(" ", 1))
            else:
                self.take(line)
        self.problem = self._lines.problem

    def _note(self, what: str, words: str = "") -> None:
        if what == "job":
            self._toml.append(words)
            return
        # Any other message ends the job, which the script sends first
        if self._toml:
            self.job, self._toml = _parsed(self._toml), []
        if what == "now":
            self._ahead = float(words) - time.time()
        elif what == "lock":
            state, _, since = words.partition(" ")
            finished = self.total is not None and self.step >= self.total
            self.state = {"held": "running", "unknown": ""}.get(state, "finished" if finished else "not running")
            # The script sends 0 if there is no lock file
            self.started = float(since) or None
        elif what == "log":
            # The last line of a log may be empty
            name, written, text = (*words.split(" ", 2), "")[:3]
            self.logs[Path(name).stem] = float(written), text

    def close(self) -> None:
        """Ends the connection, and with it the script on the host."""
        self._lines.close()


def _parsed(lines: Iterable[str]) -> Mapping[str, Any]:
    try:
        return tomllib.loads("\n".join(lines))
    except ValueError:
        return {}


def _last_line(path: Path) -> str:
    with path.open("rb") as file:
        # A log may be large, and its last line is enough
        file.seek(max(0, path.stat().st_size - 2000))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
