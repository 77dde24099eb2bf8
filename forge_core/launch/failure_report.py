"""Failure reports of a rank: sent to our launcher over a socket, and to the other ranks over the rendezvous."""

from __future__ import annotations

import json
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from attrs import asdict, frozen

from forge_core.contracts.errors import ExitCode, ForgeError, JobError

LONGEST = 60_000
"""Characters of a text that are passed on, the last ones: a socket takes this much in one piece."""


@frozen(kw_only=True)
class FailureReport:
    """Why a rank ends before the run does."""

    rank: int
    code: int
    text: str
    """For a person, complete: a traceback, or an error of ours in words."""
    time: float
    """On the monotonic clock of its machine."""
    echo: bool = False
    """Whether the rank ends only because another one does."""

    @property
    def bad_job(self) -> bool:
        return self.code == ExitCode.BAD_JOB

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> FailureReport:
        return cls(**json.loads(text))


class EndedElsewhere(ForgeError):
    """Another rank has ended the run."""

    def __init__(self, report: FailureReport) -> None:
        super().__init__(f"rank {report.rank} has ended the run")
        self.report = report


def report_of(rank: int, error: BaseException) -> FailureReport:
    """The report of a rank that fails with `error`."""
    if isinstance(error, EndedElsewhere):
        return echo_of(error.report, rank)
    now = time.monotonic()
    code = error.exit_code if isinstance(error, ForgeError) else ExitCode.FAILED
    return FailureReport(rank=rank, code=int(code), text=describe(rank, error)[-LONGEST:], time=now)


def echo_of(report: FailureReport, rank: int) -> FailureReport:
    """The report of a rank that ends because another one did."""
    text = f"forge-run: rank {rank}: rank {report.rank} has ended the run"
    return FailureReport(rank=rank, code=report.code, text=text, time=time.monotonic(), echo=True)


def describe(rank: int, error: BaseException) -> str:
    """An error of ours in words, any other one as a traceback."""
    if isinstance(error, JobError):
        return str(error)
    if isinstance(error, ForgeError):
        return f"forge-run: rank {rank}: {error}"
    return f"forge-run: rank {rank} failed:\n{''.join(traceback.format_exception(error)).rstrip()}"


def emit(report: FailureReport) -> None:
    """Pass the report on to whoever shows it: our launcher, else standard error."""
    _emitter(report)


def set_emitter(emitter: Callable[[FailureReport], object]) -> None:
    """Pass the reports of this process to `emitter` from now on."""
    global _emitter
    _emitter = emitter


def _print(report: FailureReport) -> None:
    if not report.echo:
        print(report.text, file=sys.stderr, flush=True)


_emitter: Callable[[FailureReport], object] = _print


def send(launcher: socket.socket, report: FailureReport) -> None:
    """Send a report to our launcher."""
    with suppress(OSError):  # it is dead
        launcher.sendall(report.to_json().encode() + b"\n")


def receive(rank: socket.socket) -> FailureReport | None:
    """The report that a rank has sent; None if it has sent none."""
    rank.setblocking(False)
    parts = []
    with suppress(OSError):
        while part := rank.recv(1 << 16):
            parts.append(part)
    line, newline, _ = b"".join(parts).partition(b"\n")
    return FailureReport.from_json(line) if newline else None
