"""The file `events.jsonl` of a run: what it did when, over all its starts.

A line is a JSON object with `event`, `start` (which start of the run), `t` (Unix seconds), and mostly `step` and `s`:
the seconds by phase that no earlier line of this start has. So all `s` of a start add up to its time.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_core.contracts.phase import Phase

EVENTS = "events.jsonl"
DIGITS = 4
"""Decimals of seconds in the file. What rounding leaves over goes to the next line."""


def process_began(latest: float) -> float:
    """Returns when this process began, in Unix seconds, and `latest` at most, also where the system does not say."""
    try:
        # Field 22 of proc(5), `starttime`, in ticks since boot; the name of the program, before it, may hold spaces
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        running = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux
        return latest
    return min(latest, time.time() - running)


class EventLog:
    """Appends events of one start of a run. What cannot be written (the disk is full, say) is written later."""

    def __init__(self, path: Path, seconds: Mapping[str, float]) -> None:
        """Open the file.

        Args:
            path: file, made if it is not there.
            seconds: what each phase has taken since the engine began in this process (`TrainContext.seconds`).
        """
        self.start = uuid.uuid4().hex[:8]
        # Times of lines are sums of phases from here on: a clock that is set during the run moves none of them
        engine_began = time.time() - sum(seconds.values())
        self.began = process_began(engine_began)
        self._imports = max(0.0, engine_began - self.began)
        self._noted: dict[str, float] = {}
        self._path, self._unwritten, self._warned = path, b"", False
        self._file: int | None = None
        self._guard(self._open)

    def add(self, event: str, seconds: Mapping[str, float], phases: Callable[[str], bool], **facts: Any) -> None:
        """Append a line with the seconds, not noted so far, of those phases that `phases` is true of.

        Its time is the sum of all seconds in the file: lines with one reading of the clock follow each other without
        gaps.
        """
        spent, seconds = {}, {Phase.IMPORTS: self._imports, **seconds}
        for phase, total in seconds.items():
            new = round(total - self._noted.get(phase, 0.0), DIGITS)
            if new > 0 and phases(phase):
                spent[phase] = new
                self._noted[phase] = self._noted.get(phase, 0.0) + new
        self.write(event, self.began + sum(self._noted.values()), **facts, s=spent)

    def write(self, event: str, t: float, **facts: Any) -> None:
        """Append a line of time `t`."""
        line = {"event": event, "t": round(t, DIGITS), "start": self.start, **facts}
        self._unwritten += json.dumps(line).encode() + b"\n"
        self._guard(self._write)

    def not_noted(self, phase: str, seconds: Mapping[str, float]) -> float:
        """Returns the seconds of a phase that no line has."""
        return seconds.get(phase, 0.0) - self._noted.get(phase, 0.0)

    def now(self, engine_s: float) -> float:
        """Returns the present time by the clock of the file, `engine_s` seconds after the engine began."""
        return self.began + self._imports + engine_s

    def sync(self) -> None:
        """Put the lines where they outlive the machine."""
        self._guard(lambda: os.fsync(self._file) if self._file is not None else None)

    def close(self) -> None:
        """Write and sync all pending lines. More lines may follow: a hook is notified of an error after the end."""
        self._guard(self._write)
        self.sync()

    def _open(self) -> None:
        # O_APPEND: no line is overwritten, even if a second process writes to the same file
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # half a line, of a process that was killed
            self._unwritten = b"\n" + self._unwritten

    def _write(self) -> None:
        if self._file is None:
            self._open()
        assert self._file is not None
        while self._unwritten:  # a disk that is nearly full takes a part of a line
            self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if not self._warned:  # once: each further line would fail in the same way
                text = f"{self._path}: {error.strerror}; training continues, and the lines are written when possible"
                warnings.warn(text, stacklevel=2)
                self._warned = True

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the events of a file in order. Lines that are torn or no events are passed over; no file has none."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        yield from whole_lines(file)


def whole_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yields the objects of lines of JSON."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def host_name() -> str:
    """Returns the name of this machine, as SLURM has it where it runs."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
