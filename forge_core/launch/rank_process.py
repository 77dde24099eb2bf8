"""This process as one rank of several: its output, requests to stop it, its failure report, its exit code."""

from __future__ import annotations

import atexit
import faulthandler
import io
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from forge_core.contracts.errors import ExitCode
from forge_core.launch.failure_report import FailureReport, describe, report_of
from forge_core.launch.stop_requests import Deliver, StopRequests
from forge_core.launch.world import CONTROL, World

if TYPE_CHECKING:
    from forge_core.launch.rendezvous import Rendezvous

UNKNOWN_TIMEOUT_S = 120.0
"""How long a rank whose job cannot even be read tries to reach the others."""
LOGS = "logs"
"""Folder of the ranks' logs, in the run folder."""


class RankProcess:
    """This process as a rank of its run.

    There is one object of it, `this_process`: signal handlers, the descriptors of the output and the connection to the
    launcher are the process's too. In a process alone, and in a script that trains under torchrun, `run` is not called:
    output and exit are then the script's own.
    """

    def __init__(self) -> None:
        self.rendezvous: Rendezvous | None = None
        """The connection to the other ranks, from `join` to `leave`."""
        self._world = World()
        self._log: RankLog | None = None
        self._launcher: socket.socket | None = None
        self._stop_requests: StopRequests | None = None
        self._reported = False

    def join(self, world: World, start_timeout_s: float, hang_timeout_s: float) -> Rendezvous:
        """The connection to the other ranks, which the first call opens; arguments and errors are `Rendezvous`'s."""
        if self.rendezvous is None:
            # Late: torch takes seconds to import, which a rank whose job is wrong does without
            from forge_core.launch.rendezvous import Rendezvous

            self._world = world
            self.rendezvous = Rendezvous(world, start_timeout_s, hang_timeout_s)
        return self.rendezvous

    def leave(self) -> None:
        """Leave the other ranks, when this one needs them no more."""
        rendezvous, self.rendezvous = self.rendezvous, None
        if rendezvous is not None:
            rendezvous.leave()

    def run(self, world: World, work: Callable[[RankLog], int]) -> NoReturn:
        """Do the work of this rank and end the process with the exit code that `work` returns.

        If it raises, the other ranks end too, and the first rank that failed reports why.
        """
        self._world, self._log = world, RankLog(world.rank)
        if CONTROL in os.environ:
            self._launcher = socket.socket(fileno=int(os.environ[CONTROL]))
        # Before the job is read, which takes seconds: SIGTERM would end this rank alone then, and others wait for it
        self._stop_requests = StopRequests(self._stop_before_training, self._launcher)
        try:
            code = work(self._log)
        except BaseException as error:
            report = self.end_run(error)
            self._log.write(describe(world.rank, error))
            self._exit(report.code)
        # Functions that Python code registered for the end of the interpreter, which `os._exit` leaves out
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        self._exit(code)

    @contextmanager
    def delivering_stop_requests(self, deliver: Deliver) -> Iterator[None]:
        """Call `deliver` on requests to stop while this context lasts. Without effect outside the main thread."""
        if threading.current_thread() is not threading.main_thread():  # Python sets signal handlers only there
            yield
        elif self._stop_requests is None:
            with closing(StopRequests(deliver)):
                yield
        else:
            self._stop_requests.deliver = deliver
            try:
                yield
            finally:
                # Not back to `_stop_before_training`: a run that is about to exit has nothing left to stop
                self._stop_requests.deliver = lambda number: None

    def _stop_before_training(self, number: signal.Signals) -> None:
        # Nothing has been trained, so there is nothing to save, and no need to wait for the main thread
        text = f"forge-run: rank {self._world.rank} was asked to stop (signal {number.name}) before training began"
        report = FailureReport(rank=self._world.rank, code=ExitCode.STOPPED, text=text)
        if self.rendezvous is not None:
            with suppress(Exception):
                report = self.rendezvous.end(report)
        assert self._log is not None
        self._log.write(text)
        if self._launcher is None:  # our launcher asks the other ranks itself
            self.leave()
        os._exit(report.code)

    def end_run(self, error: BaseException) -> FailureReport:
        """End the run for all ranks, since this one fails and the others would wait for it; may be called again.

        Returns:
            The report of this rank: an echo if another one ended the run first.
        """
        report = report_of(self._world.rank, error)
        if not report.echo:
            with suppress(Exception):  # the process that serves the store has gone
                # The others wait even for a rank that could not read its job and so has joined nobody; but our launcher
                # sees by itself that a rank fails
                if self._launcher is None:
                    self.join(self._world, UNKNOWN_TIMEOUT_S, UNKNOWN_TIMEOUT_S)
                if self.rendezvous is not None:
                    first = self.rendezvous.end(report)
                    report = report if first.rank == report.rank else first.echoed_by(report.rank)
        # After the store, which says whether this rank was first
        self.emit(report)
        return report

    def emit(self, report: FailureReport) -> None:
        """Send the report to our launcher, or show it. Only the first one: later ones follow from it."""
        if self._reported:
            return
        self._reported = True
        # By a socket and not by the store: the launcher has no torch, and the store may be what has failed
        if self._launcher is not None:
            with suppress(OSError):  # it is dead
                self._launcher.sendall(report.to_json().encode() + b"\n")
        elif not report.echo:  # the rank that was first shows the cause
            print(report.text, file=self._log.terminal if self._log else sys.stderr, flush=True)

    def _exit(self, code: int) -> NoReturn:
        self.leave()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not by the interpreter's end: other ranks may be gone, and torch might wait for them there; and a thread of
        # gloo that frees a tensor at that time aborts the process (1 of 120 runs that had saved all)
        os._exit(code)


this_process = RankProcess()


class RankLog:
    """Sends the output of this process to terminal or log. Until the run folder is known, the log is a temporary file.

    Rank 0 goes on writing to the terminal, and its standard error (warnings, errors) goes to its log too. All output of
    other ranks goes to their logs, that of libraries in C included.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.terminal: TextIO = os.fdopen(os.dup(2), "w", errors="backslashreplace")
        """Standard error as it was, for messages that must be seen whichever rank writes them."""
        self.file: Any = tempfile.TemporaryFile("w+", errors="backslashreplace")  # noqa: SIM115
        if rank:
            self._redirect()
        else:
            sys.stderr = _Both(sys.stderr, self)
        faulthandler.enable(self.terminal)

    def open(self, folder: Path) -> None:
        """Write into the run folder from now on."""
        path = folder / LOGS / f"rank-{self._rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with self.file as early:
            self.file = path.open("a", buffering=1, errors="backslashreplace")
            if self._rank:
                self._redirect()
            early.seek(0)
            self.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}\n{early.read()}", end="")
        faulthandler.enable(self.file)  # before, it writes to the terminal

    def write(self, text: str, end: str = "\n") -> None:
        """Write into the log only."""
        print(text, end=end, file=self.file, flush=True)

    def _redirect(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        # The descriptors and not `sys.stdout`, which C++ code of torch and NCCL does not know
        for descriptor in (1, 2):
            os.dup2(self.file.fileno(), descriptor)


class _Both(io.TextIOBase):
    """Standard error of rank 0: the terminal, and the log."""

    def __init__(self, terminal: TextIO, log: RankLog) -> None:
        self.terminal, self.log = terminal, log

    def write(self, text: str) -> int:
        self.terminal.write(text)
        return self.log.file.write(text)

    def flush(self) -> None:
        self.terminal.flush()
        self.log.file.flush()

    def fileno(self) -> int:
        """The log's: the stacks of a rank that hangs are written to it by number."""
        self.flush()
        return self.log.file.fileno()

    def isatty(self) -> bool:
        return self.terminal.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.terminal.encoding
