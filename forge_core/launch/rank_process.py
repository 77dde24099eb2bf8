"""A process that is one rank of several, from its start to its exit code."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from forge_core.contracts.errors import ExitCode
from forge_core.launch import failure_report
from forge_core.launch.failure_report import FailureReport, echo_of, report_of
from forge_core.launch.rank_log import RankLog
from forge_core.launch.stop_requests import open_for_process
from forge_core.launch.world import CONTROL, World

if TYPE_CHECKING:
    from forge_core.launch.rendezvous import Rendezvous

UNKNOWN_TIMEOUT_S = 120.0
"""How long a rank whose job cannot even be read tries to reach the others."""


class RankProcess:
    """This process as a rank: its log, its requests to stop, its failure report."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.log = RankLog(world.rank)
        self._reported = False
        descriptor = os.environ.get(CONTROL)
        self._launcher = socket.socket(fileno=int(descriptor)) if descriptor is not None else None

    def run(self, work: Callable[[RankLog], int]) -> NoReturn:
        """Do the work of this rank and end the process with the exit code that `work` returns. If it raises, the other
        ranks end too, and the first rank that failed reports why."""
        open_for_process(self._stop_before_training, self._launcher)
        failure_report.set_emitter(self._emit)
        try:
            code = work(self.log)
        except BaseException as error:
            report = self._end_run(report_of(self.world.rank, error))
            self.log.write(failure_report.describe(self.world.rank, error))
            self._emit(report)
            self._exit(report.code)
        _run_exit_functions()
        self._exit(code)

    def _end_run(self, report: FailureReport) -> FailureReport:
        """End the run for the other ranks; returns this rank's report, as an echo if another one came first."""
        if report.echo:
            return report
        with suppress(Exception):  # the process that serves the store has gone
            rendezvous = _rendezvous() or self._join()
            first = rendezvous.end(report) if rendezvous is not None else report
            return report if first.rank == report.rank else echo_of(first, self.world.rank)
        return report

    def _join(self) -> Rendezvous | None:
        """Our launcher sees by itself that a rank fails, so for that its ranks need not join the others."""
        if self._launcher is not None:
            return None
        from forge_core.launch.rendezvous import join_rendezvous

        return join_rendezvous(self.world, UNKNOWN_TIMEOUT_S, UNKNOWN_TIMEOUT_S)

    def _emit(self, report: FailureReport) -> None:
        """To our launcher, which chooses among the ranks; without it to the terminal, unless another rank was first.
        Only the first report: later ones follow from it."""
        if self._reported:
            return
        self._reported = True
        if self._launcher is not None:
            failure_report.send(self._launcher, report)
        elif not report.echo:
            print(report.text, file=self.log.terminal, flush=True)

    def _stop_before_training(self, reason: str) -> None:
        """A request to stop while nothing has been trained: there is nothing to save, and no need to go on."""
        text = f"forge-run: rank {self.world.rank} was asked to stop ({reason}) before training began"
        report = FailureReport(rank=self.world.rank, code=ExitCode.STOPPED, text=text, time=time.monotonic())
        rendezvous = _rendezvous()
        if rendezvous is not None:
            with suppress(Exception):
                report = rendezvous.end(report)
        self.log.write(text)
        if rendezvous is not None and self._launcher is None:  # our launcher asks the other ranks itself
            rendezvous.leave()
        os._exit(report.code)

    def _exit(self, code: int) -> NoReturn:
        """End at once. Other ranks may be gone, and torch might wait for them when the interpreter ends; a thread of
        gloo that frees a tensor then would abort the process."""
        rendezvous = _rendezvous()
        if rendezvous is not None:
            rendezvous.leave()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_exit_functions() -> None:
    """Run what Python code has registered for the end of the interpreter, which `os._exit` leaves out."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _rendezvous() -> Rendezvous | None:
    """The rendezvous of this process, if it has joined one; without the import of torch if it has not."""
    module = sys.modules.get("forge_core.launch.rendezvous")
    return module.current_rendezvous() if module else None
