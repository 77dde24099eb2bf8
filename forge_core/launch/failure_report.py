"""Failure reports of a rank: sent to our launcher over a socket, and to the other ranks over the rendezvous."""

from __future__ import annotations

import json
import socket
import time
import traceback

from attrs import asdict, field, frozen

from forge_core.contracts.errors import ExitCode, ForgeError, in_words
from forge_core.contracts.run_end import Cause, End, one_line

LONGEST = 20_000
"""Bytes of a text that are passed on, half from each end: JSON makes them up to six times as many, and a socket takes
200,000 without somebody who reads."""


@frozen(kw_only=True)
class FailureReport:
    """Why a rank ends before the run does."""

    rank: int
    code: int = ExitCode.FAILED
    text: str
    """For a person, complete: a traceback, or an error of ours in words."""
    reason: str = ""
    """The same in one line, without the traceback."""
    host: str = field(factory=socket.gethostname)
    time: float = field(factory=time.monotonic)
    """On the monotonic clock of its machine."""
    echo: bool = False
    """Whether the rank ends only because another one does."""
    hang: bool = False
    """Whether ranks stand still, so that their main threads cannot end by themselves."""
    silent: bool = False
    """Whether a rank does not even respond."""
    late: int | None = None
    """The first rank that stands still, on `host`, where it is known."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> FailureReport:
        return cls(**json.loads(text))

    def end(self, step: int | None = None) -> End:
        """The end of the run that this is the cause of, after `step` completed steps."""
        cause = Cause.SILENT if self.silent else Cause.HANG if self.hang else Cause.of(self.code)
        rank = self.rank if self.late is None else self.late
        return End(code=self.code, cause=cause, reason=self.reason or self.text, rank=rank, host=self.host, step=step)


class EndedElsewhere(ForgeError):
    """Another rank has ended the run."""

    def __init__(self, report: FailureReport) -> None:
        super().__init__(f"rank {report.rank} has ended the run: {one_line(report.reason or report.text)}")
        self.exit_code = report.code  # type: ignore[assignment]


def report_of(rank: int, error: BaseException) -> FailureReport:
    """The report of a rank that fails with `error`."""
    code = int(error.exit_code) if isinstance(error, ForgeError) else ExitCode.FAILED
    text, echo = shortened(describe(rank, error)), isinstance(error, EndedElsewhere)
    reason = in_words(error).removeprefix("forge-run: ") or f"{type(error).__name__}: {error}"
    return FailureReport(rank=rank, code=code, text=text, reason=one_line(reason), echo=echo)


def shortened(text: str) -> str:
    """The first and the last `LONGEST` / 2 bytes of a text: the frames of a traceback, and the end of its message."""
    encoded = text.encode(errors="backslashreplace")
    if len(encoded) <= LONGEST:
        return text
    head, tail = (part.decode(errors="ignore") for part in (encoded[: LONGEST // 2], encoded[-LONGEST // 2 :]))
    return f"{head}\n[… {len(encoded) - LONGEST:,} bytes left out …]\n{tail}"


def describe(rank: int, error: BaseException) -> str:
    """An error of ours in words, any other one as a traceback."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    return in_words(error, f"forge-run: rank {rank}") or f"forge-run: rank {rank} failed:\n{trace}"
