"""Starts the runs of a comparison as processes, several at a time, and stops them when asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from attrs import define, field

from forge_core.contracts.errors import ExitCode
from forge_plugin_runs.compare.grid import Trial

PAUSE_S = 0.05
"""Between looks at the processes."""
MARGIN = 1.2
"""Free memory that a further run needs, in peaks of the largest run so far."""
CHILD = "forge_plugin_runs.compare.child"


@define(kw_only=True)
class Finished:
    """One process of a run, ended."""

    trial: Trial
    code: int
    """Exit code; negative: ended by this signal."""
    cpu_seconds: float
    peak_memory: int
    """Bytes of its largest process."""


@define
class _Running:
    trial: Trial
    process: subprocess.Popen[bytes]
    device: Sequence[int]


@define(kw_only=True)
class Processes:
    """Runs trials, each in its own process (with its own ranks) and its own session."""

    logs: Path
    ranks: int = 1
    parallel: int = 1
    gpus: int = 0
    """GPUs that runs share out among themselves, `ranks` each; 0: every run sees all."""
    largest: int = 0
    """Peak memory in bytes of the largest run so far; 0: unknown."""
    _running: list[_Running] = field(factory=list, init=False)
    _stopping: bool = field(default=False, init=False)

    def run(self, trials: Sequence[Trial], stop_at: int, on_end: Callable[[Finished], object]) -> bool:
        """Run all trials, up to the step `stop_at` or their ends (0), and call `on_end` after each.

        Returns:
            Whether all were run: False after SIGINT or SIGTERM, which are passed on to the running ones, once for each.
        """
        waiting = deque(trials)
        with self._passing_signals_on():
            while self._running or (waiting and not self._stopping):
                # One at a time, as each that starts takes memory from the next
                while waiting and not self._stopping and self._has_room():
                    self._start(waiting.popleft(), stop_at)
                for running in list(self._running):
                    # Not `Popen.poll`: this also returns CPU time and peak memory, with the ranks of the run
                    pid, status, usage = os.wait4(running.process.pid, os.WNOHANG)
                    if pid:
                        self._running.remove(running)
                        # Popen must not wait for a process that is gone
                        running.process.returncode = code = os.waitstatus_to_exitcode(status)
                        # Linux counts ru_maxrss in kB
                        self.largest = max(self.largest, memory := usage.ru_maxrss * 1024)
                        seconds = usage.ru_utime + usage.ru_stime
                        on_end(Finished(trial=running.trial, code=code, cpu_seconds=seconds, peak_memory=memory))
                time.sleep(PAUSE_S)
        return not self._stopping

    def _has_room(self) -> bool:
        if not self._running:
            return True
        if len(self._running) >= self.parallel:
            return False
        # Of the first ones nothing is known but what they hold now: the next waits until they have grown
        need = max([self.largest, *(_peak(running.process.pid) for running in self._running)])
        free = free_memory()
        return free is None or free > MARGIN * need

    def _start(self, trial: Trial, stop_at: int) -> None:
        arguments = [sys.executable, "-m"]
        arguments += [CHILD, str(stop_at)] if stop_at else ["forge_core", "run"]
        arguments += [str(trial.cell.job), *trial.overrides, *trial.arguments]
        arguments += ["--nproc", str(self.ranks)] if self.ranks > 1 else []
        taken = {gpu for running in self._running for gpu in running.device}
        device = [gpu for gpu in range(self.gpus) if gpu not in taken][: self.ranks]
        # In its own session: a Ctrl-C reaches it only from this process, once, and not a second time from the terminal
        with (self.logs / f"{trial.name}.log").open("ab") as log:
            process = subprocess.Popen(
                arguments, stdout=log, stderr=subprocess.STDOUT, env=self._environment(device), start_new_session=True
            )
        self._running.append(_Running(trial, process, device))

    def _environment(self, device: Sequence[int]) -> dict[str, str]:
        # Without the variables of a rank: a run is not a rank of this command's own launcher
        others = {name: v for name, v in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        if self.parallel > 1:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            # Each run would otherwise use all cores
            others.setdefault("OMP_NUM_THREADS", str(max(1, cores // (self.parallel * self.ranks))))
        return others | ({"CUDA_VISIBLE_DEVICES": ",".join(map(str, device))} if device else {})

    @contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        def handle(number: int, _: FrameType | None) -> None:
            self._stopping = True
            for running in self._running:
                with suppress(ProcessLookupError):  # it may have ended meanwhile
                    running.process.send_signal(number)

        before: dict[signal.Signals, Any] = {
            number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def succeeded(code: int) -> bool:
    """Whether a process ended as it should: finished, or stopped with everything saved."""
    return code in (ExitCode.FINISHED, ExitCode.STOPPED)


def free_memory() -> int | None:
    """Returns bytes that new processes can take without swapping; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        [available] = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError):
        return None
    # A container may be allowed less than the machine has free
    limits = [(_number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current"))]
    return min([available, *(limit - used for limit, used in limits if limit is not None and used is not None)])


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # "max", or no control group
        return None


def _peak(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
