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

from attrs import evolve

from forge_core.contracts.errors import ExitCode
from forge_core.contracts.run_end import Cause, End
from forge_core.launch.failure_report import EndedElsewhere, FailureReport, describe, report_of
from forge_core.launch.progress_beacon import ProgressBeacon
from forge_core.launch.stop_requests import Deliver, StopRequests, end_at_once
from forge_core.launch.world import ALIVE, CONTROL, World

if TYPE_CHECKING:
    from forge_core.launch.rendezvous import Rendezvous

UNKNOWN_TIMEOUT_S = 120.0
"""How long a rank whose job cannot even be read tries to reach the others."""
LOGS = "logs"


class RankProcess:
    """This process as a rank of its run: a single object, `this_process`, as signal handlers are the process's too.

    In a process alone, and in a script that trains under torchrun, `run` is not called: output and exit are its own.
    """

    def __init__(self) -> None:
        self.rendezvous: Rendezvous | None = None
        """The connection to the other ranks, from `join` to `leave`."""
        self.verbosity = 0
        """Level of output: -1 warnings and the end, 0 progress, 1 the resolved job and every step too."""
        self._world = World()
        self._log: RankLog | None = None
        self._launcher: socket.socket | None = None
        self._stop_requests: StopRequests | None = None
        self._stopping = threading.Lock()
        self._exit_limit_s = 0.0
        self._reported = False
        self._write_end: Callable[[End], object] = lambda end: None
        self.completed: Callable[[], int | None] = lambda: None
        """Returns the completed steps of the run; None before it has begun to train."""

    def join(self, world: World, *limits_s: float) -> Rendezvous:
        """The connection to the other ranks, which the first call opens; `limits_s` are the limits of `Rendezvous`."""
        if self.rendezvous is None:
            # Late: torch takes seconds to import, which a rank with an invalid job does not need
            from forge_core.launch.rendezvous import Rendezvous

            self._world = world
            self.rendezvous = Rendezvous(world, *limits_s)
            self._exit_limit_s = self.rendezvous.hang_timeout_s
        return self.rendezvous

    def leave(self) -> None:
        """Leave the other ranks, when this one needs them no more."""
        rendezvous, self.rendezvous = self.rendezvous, None
        if rendezvous is not None:
            rendezvous.leave()

    def run(self, world: World, work: Callable[[RankLog], int]) -> NoReturn:
        """End the process with the exit code that `work` returns; if it raises, the other ranks end too."""
        self._world, self._log = world, RankLog(world.rank)
        try:
            code = work(self._log)
        except BaseException as error:
            report = self.end_run(error)
            self._log.write(describe(world.rank, error))
            self._exit(report.code)
        threading._shutdown()  # type: ignore[attr-defined]  # `os._exit` leaves this and the next line out
        atexit._run_exitfuncs()
        self._exit(code)

    def finish(self) -> None:
        """The work of this rank is done: from now on its exit is watched, if it is an exit of `run`."""
        if self._log is not None or self._launcher is not None:  # also of a launcher's only rank
            self._show_life()  # before the process can exit: the new thread may not have run by then
            threading.Thread(target=self._watch_exit, name="forge-exit", daemon=True).start()

    def _watch_exit(self) -> None:
        """Send our launcher signs of life, and end this process if its exit takes too long."""
        idle_s, reports = 0, ProgressBeacon.reports
        while not self._exit_limit_s or idle_s <= self._exit_limit_s:
            time.sleep(1)
            self._show_life()
            idle_s = idle_s + 1 if ProgressBeacon.reports == reports else 0
            reports = ProgressBeacon.reports
        self.emit(
            FailureReport(
                rank=self._world.rank,
                text=f"forge-run: rank {self._world.rank} has done its work and does not exit within "
                f"launch.hang_timeout_s = {self._exit_limit_s:g} s: {_unfinished()}",
            )
        )
        os._exit(ExitCode.FAILED)

    def _show_life(self) -> None:
        if self._launcher is not None:
            with suppress(OSError):  # without waiting: a launcher that is stopped reads nothing
                self._launcher.send(ALIVE, socket.MSG_DONTWAIT)

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """A request to stop ends this process at once while this context lasts, until training begins."""
        # From before the job is read: SIGTERM would end a rank alone then, and the others wait for it
        if threading.current_thread() is not threading.main_thread():  # Python sets signal handlers only there
            yield
            return
        self._launcher = socket.socket(fileno=int(os.environ[CONTROL])) if CONTROL in os.environ else None
        try:
            requests = StopRequests(self._stop_before_training, self._launcher, self._end_at_once)
            with closing(requests) as self._stop_requests:
                yield
        finally:
            self._stop_requests = None

    @contextmanager
    def recording_end(self, rank: int, write: Callable[[End], object]) -> Iterator[list[End]]:
        """Hand the end of the run to `write`: the error of this rank, or on rank 0 the entry added to the list."""
        started, ends = time.time(), list[End]()
        self._write_end = lambda end: write(evolve(end, started=started))
        try:
            yield ends
            for end in ends if rank == 0 else ():
                self.record(end)
        except BaseException as error:
            if self.rendezvous is None:  # a process alone, or a rank of a process group that the caller made
                self.record(report_of(rank, error).end(self.completed()))
            else:
                self.end_run(error)
            raise
        finally:
            self._write_end = lambda end: None
            self.completed = lambda: None  # the run's own would keep its model in memory

    def record(self, end: End) -> None:
        """Hand an end to the run folder. It keeps the first of a start, since others follow from it."""
        with suppress(OSError):  # a full disk: the end itself has been shown
            self._write_end(end)

    @contextmanager
    def delivering_stop_requests(self, deliver: Deliver) -> Iterator[None]:
        """Call `deliver` on requests to stop while this context lasts. Without effect outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
        elif self._stop_requests is None:  # a run that a script or a notebook has started
            with closing(StopRequests(deliver, on_second=self._end_at_once)):
                yield
        else:
            self._stop_requests.deliver = deliver
            try:
                yield
            finally:  # not back to `_stop_before_training`: a run that is about to exit has nothing left to stop
                self._stop_requests.deliver = lambda number: None

    def _end_at_once(self) -> None:
        self.record(
            End(
                code=ExitCode.SECOND_SIGNAL,
                cause=Cause.SIGNAL,
                reason="ended at once by a second signal, without a save",
                step=self.completed(),
            )
        )
        end_at_once()

    def _stop_before_training(self, number: signal.Signals) -> None:
        """End this process, from whichever thread: the main one may be in native code, which no signal interrupts."""
        if not self._stopping.acquire(blocking=False):  # the other of two threads that deliver one request
            return
        reason = f"stopped by {number.name} before training began"
        text = f"forge-run: {reason}; there is nothing new to save"
        self.record(End(code=ExitCode.STOPPED, cause=Cause.SIGNAL, signal=number.name, reason=reason))
        report = FailureReport(rank=self._world.rank, code=ExitCode.STOPPED, text=text)
        if self.rendezvous is not None:
            with suppress(Exception):
                report = self.rendezvous.end(report)
        if self._world.rank == 0:
            # By its number, as the main thread may hold the lock of the stream
            os.write(self._log.terminal.fileno() if self._log else 2, f"{text}\n".encode())
        if self._log is not None:
            self._log.write(text)
        if self._launcher is None or self._world.spread:  # else our launcher queries the other ranks itself
            self.leave()
        # Processes that read data: they would wait for their parent for ever
        for child in sys.modules["multiprocessing"].active_children() if "multiprocessing" in sys.modules else ():
            child.kill()
        os._exit(report.code)  # without the main thread: there is nothing to save

    def end_run(self, error: BaseException) -> FailureReport:
        """End the run for all ranks, since this one fails; its report is an echo if another one was first."""
        report = report_of(self._world.rank, error)
        if not report.echo:
            with suppress(Exception):  # the process that serves the store has gone
                # The others wait even for a rank that could not read its job and so has joined nobody
                if self._launcher is None or self._world.spread:  # else it sees by itself that a rank fails
                    self.join(self._world, UNKNOWN_TIMEOUT_S, UNKNOWN_TIMEOUT_S)
                if self.rendezvous is not None:
                    first = self.rendezvous.end(report)
                    report = report if first.rank == report.rank else report_of(report.rank, EndedElsewhere(first))
        self.emit(report)  # after the store, which determines whether this rank was first
        return report

    def emit(self, report: FailureReport) -> None:
        """Send the report to our launcher, or show it. Only the first one: later ones follow from it."""
        if self._reported:
            return
        self._reported = True
        # By a socket and not by the store: the launcher has no torch, and the store may be what has failed
        if self._launcher is not None:
            with suppress(OSError):
                self._launcher.sendall(report.to_json().encode() + b"\n")
        elif not report.echo:
            print(report.text, file=self._log.terminal if self._log else sys.stderr, flush=True)
        if not report.echo:
            self.record(report.end(self.completed()))

    def _exit(self, code: int) -> NoReturn:
        self.leave()
        with suppress(OSError):  # a full disk
            sys.stdout.flush()
            sys.stderr.flush()
        # Not by the interpreter's end, where torch may wait for ranks that have gone, and a thread of gloo that frees a
        # tensor aborts the process (1 of 120 runs that had saved all)
        os._exit(code)


def _unfinished() -> str:
    """The threads that the interpreter waits for at its exit, and where they are; without any, the main thread."""
    from forge_core.launch.watchdog import line_of

    main, frames = threading.main_thread(), sys._current_frames()
    threads = [each for each in threading.enumerate() if not each.daemon and each is not main] or [main]
    return "; ".join(
        f"thread {each.name} is at {line_of(frames[each.ident])}" for each in threads if each.ident in frames
    )


this_process = RankProcess()


class RankLog:
    """Output of this process: rank 0 writes to the terminal, and errors also to its log; other ranks to their logs.

    Until the run folder is known, the log is a temporary file.
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
        faulthandler.enable(self.file)

    def write(self, text: str, end: str = "\n") -> None:
        """Write into the log only. A full disk is no reason to end, and the end of a run has other words to show."""
        with suppress(OSError):
            print(text, end=end, file=self.file, flush=True)

    def _redirect(self) -> None:
        for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(self.file.fileno(), descriptor)  # C++ code of torch and NCCL does not know `sys.stdout`


class _Both(io.TextIOBase):
    """Standard error of rank 0: the terminal, and the log."""

    def __init__(self, terminal: TextIO, log: RankLog) -> None:
        self.terminal, self.log = terminal, log

    def write(self, text: str) -> int:
        self.terminal.write(text)
        self.log.write(text, end="")
        return len(text)

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
