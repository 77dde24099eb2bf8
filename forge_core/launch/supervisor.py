"""Starts the ranks of a run on this machine, passes requests to stop on, and ends them all when one fails.

Our own rather than torch's elastic agent, which kills after a fixed 30 s, replaces exit codes by its own, and does not
pass SIGUSR1 on. Each rank is a fresh interpreter, not a fork: this process needs no torch then, what the plugins have
started here (threads, CUDA) cannot break in a child, and a rank is the same process as under torchrun or srun.

A socket to each rank carries requests to stop, and the rank's failure report back. When this process dies, however it
does, the sockets close and the ranks end.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from attrs import define, frozen

from forge_core.contracts.errors import ExitCode
from forge_core.launch.failure_report import FailureReport, receive
from forge_core.launch.stop_requests import ECHO_S, STOP_SIGNALS
from forge_core.launch.world import CONTROL, LISTENING

POLL_S = 0.05
SIMULTANEOUS_S = 0.3
"""Ranks that fail within this time of the first are compared, to find the one that was first."""
FAREWELL_S = 4.0
"""Seconds that the ranks have, once one has failed, to write down where they are."""

LOST = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""A rank that died of one of these is the cause of what the others report. Not SIGABRT: torch aborts for the sake of
other ranks."""


@define
class RankHandle:
    """A rank that was started."""

    rank: int
    process: subprocess.Popen
    control: socket.socket

    @property
    def code(self) -> int | None:
        return self.process.returncode


@frozen(kw_only=True)
class Ended:
    """How a run of several ranks came to its end."""

    code: int
    message: str = ""
    """For a person, beyond what rank 0 has printed."""


class Supervisor:
    """Runs one command as several ranks.

    Args:
        command: what each rank runs.
        ranks: the world size.
        logs: folder in which the ranks keep logs, for messages.
        grace_s: seconds that the ranks have to end after a request to stop; 0: as many as they need.
    """

    def __init__(self, command: Sequence[str], ranks: int, logs: Path, grace_s: float) -> None:
        self._command = list(command)
        self._count = ranks
        self._logs = logs
        self._grace_s = grace_s
        self._ranks: list[RankHandle] = []
        self._signals: list[int] = []
        self._last_signal = (0, 0.0)
        self._asked_at: float | None = None

    def run(self) -> Ended:
        """Start the ranks and wait until all have ended."""
        with self._signals_noted():
            try:
                self._start()
                return self._wait()
            finally:
                self._kill()

    # --- start ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        with socket.socket() as listener:  # rank 0 inherits it, so nobody can take the port in between
            listener.bind(("127.0.0.1", 0))
            listener.listen(4096)
            port = listener.getsockname()[1]
            for rank in range(self._count):
                self._ranks.append(self._spawn(rank, port, listener))
        if self._signals:  # it came meanwhile
            self._ask_all(self._signals[0])

    def _spawn(self, rank: int, port: int, listener: socket.socket) -> RankHandle:
        ours, theirs = socket.socketpair()
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": self._count,
            "LOCAL_WORLD_SIZE": self._count,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            CONTROL: theirs.fileno(),
        }
        passed = [theirs.fileno()]
        if rank == 0:
            variables[LISTENING] = listener.fileno()
            passed.append(listener.fileno())
        environment = {"OMP_NUM_THREADS": self._threads(), **os.environ}
        environment |= {name: str(value) for name, value in variables.items()}
        with theirs:
            process = subprocess.Popen(
                self._command,
                env=environment,
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C comes to this process only, which passes it on
            )
        return RankHandle(rank, process, ours)

    def _threads(self) -> str:
        """An equal share of the processor's cores: torch would take all of them for each rank."""
        return str(max(1, len(os.sched_getaffinity(0)) // self._count))

    # --- wait ----------------------------------------------------------------------------------------------------

    def _wait(self) -> Ended:
        while None in self._poll():
            if self._second_signal():
                self._kill()
                return Ended(code=ExitCode.SECOND_SIGNAL)
            if any(self._bad(rank) for rank in self._ranks):
                return self._failed()
            if late := self._too_late():
                self._kill()
                return late
            if self._asked_at is None and any(rank.code == ExitCode.STOPPED for rank in self._ranks):
                self._ask_all(signal.SIGTERM)  # one was asked to stop before it could tell the others
            time.sleep(POLL_S)
        return self._failed() if any(self._bad(rank) for rank in self._ranks) else self._well()

    def _poll(self) -> list[int | None]:
        return [rank.process.poll() for rank in self._ranks]

    def _well(self) -> Ended:
        return Ended(code=max(rank.code or 0 for rank in self._ranks))

    @staticmethod
    def _bad(rank: RankHandle) -> bool:
        return rank.code not in (None, ExitCode.FINISHED, ExitCode.STOPPED)

    def _failed(self) -> Ended:
        """A rank has failed: let the others write down where they are, end them, and report the first."""
        time.sleep(SIMULTANEOUS_S)
        self._poll()
        reports = {rank.rank: receive(rank.control) for rank in self._ranks}
        failed = [rank for rank in self._ranks if self._bad(rank) or reports[rank.rank] is not None]
        first = min(failed, key=lambda rank: _order(rank, reports[rank.rank]))
        deadline = time.monotonic() + FAREWELL_S
        while None in self._poll() and time.monotonic() < deadline and not self._second_signal():
            time.sleep(POLL_S)
        self._kill()
        return self._ended_by(first, reports[first.rank])

    def _ended_by(self, first: RankHandle, report: FailureReport | None) -> Ended:
        logs = f"logs of all ranks: {self._logs}" if self._logs.is_dir() else ""
        if report is not None:
            return Ended(code=report.code, message=report.text if report.bad_job else _lines(report.text, logs))
        assert first.code is not None
        if first.code == ExitCode.SECOND_SIGNAL:
            return Ended(code=ExitCode.SECOND_SIGNAL)
        if first.code >= 0:
            left = f"forge-run: rank {first.rank} left with exit code {first.code} and without a report"
            return Ended(code=ExitCode.FAILED, message=_lines(f"{left}; the other ranks were ended", logs))
        died = -first.code
        if died in STOP_SIGNALS:  # it was not listening yet, so there is nothing to save
            return Ended(code=ExitCode.STOPPED)
        name = signal.Signals(died).name
        why = ": the machine may be short of memory" if died == signal.SIGKILL else ""
        text = f"forge-run: rank {first.rank} was killed by {name}{why}; the other ranks were ended"
        return Ended(code=ExitCode.FAILED, message=_lines(text, logs))

    # --- requests to stop ----------------------------------------------------------------------------------------

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        previous = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        echo = number == self._last_signal[0] and now - self._last_signal[1] < ECHO_S
        self._last_signal = (number, now)
        if not echo:
            self._signals.append(number)
            self._ask_all(number)

    def _ask_all(self, number: int) -> None:
        """Ask all ranks to stop. For them this never counts as a second signal, so it may come twice."""
        self._asked_at = time.monotonic()
        for rank in self._ranks:
            with suppress(OSError):  # it has ended
                rank.control.send(bytes([number]))

    def _second_signal(self) -> bool:
        return len(self._signals) > 1

    def _too_late(self) -> Ended | None:
        """Once the ranks have had their time to stop."""
        if not self._grace_s or self._asked_at is None or time.monotonic() - self._asked_at < self._grace_s:
            return None
        slow = ", ".join(str(rank.rank) for rank in self._ranks if rank.code is None)
        text = f"forge-run: rank {slow} did not stop within launch.grace_s = {self._grace_s:g} s and was killed"
        return Ended(code=ExitCode.FAILED, message=f"{text}; the last checkpoint is intact")

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, signal.SIGKILL)
        for rank in self._ranks:
            rank.process.wait()
            rank.control.close()


def _lines(*lines: str) -> str:
    return "\n".join(line for line in lines if line)


def _order(rank: RankHandle, report: FailureReport | None) -> tuple[int, float]:
    """Smallest for the rank that is the cause. One that is lost, or left without a report, comes before those that
    report an error, which may be the lost connection to it."""
    if report is not None:
        return (3 if report.echo else 1, report.time)
    assert rank.code is not None
    return (0 if rank.code >= 0 or -rank.code in LOST else 2, 0.0)
