"""`End`: how a run ended, as `end.json` in its folder keeps it for commands and schedulers."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

from attrs import Factory, field, fields, frozen

from forge_core.contracts.errors import ExitCode

ATTEMPT = "FORGE_ATTEMPT"
"""Variable by which a scheduler's script names a start of a run: `End.attempt`."""
LONGEST = 4000
"""Characters of a reason."""


class Cause(StrEnum):
    """Kind of an end."""

    FINISHED = "finished"
    """All steps are trained."""
    REQUEST = "request"
    """`StepContext.request_stop`."""
    TIME = "time"
    """The same, because the time of the job is nearly over."""
    PLANNED = "planned"
    """`train.stop_after`."""
    SIGNAL = "signal"
    NON_FINITE = "non-finite"
    BAD_JOB = "bad job"
    FAILED = "failed"
    """An exception."""
    HANG = "hang"
    """Ranks stopped moving."""
    SILENT = "silent"
    """The process or the machine of a rank does not respond."""
    KILLED = "killed"
    """The process of a rank died without a report, or did not stop in time."""

    @classmethod
    def of(cls, code: int) -> Cause:
        """The cause of an error that `forge-run` exits with `code` for."""
        return {int(ExitCode.BAD_JOB): cls.BAD_JOB, int(ExitCode.NON_FINITE): cls.NON_FINITE}.get(code, cls.FAILED)


def one_line(text: str) -> str:
    """`text` in one line: every run of whitespace is one space."""
    return " ".join(text.split())[:LONGEST]


@frozen(kw_only=True)
class End:
    """How a run ended, or one start of it. A run that is killed as a whole, or still runs, has none."""

    code: int
    """Exit code of `forge-run`."""
    cause: Cause = field(converter=Cause)
    reason: str = field(default="", converter=one_line)
    """For people, in one line; empty if the run finished."""
    final: bool = False
    """Whether a request ended the run for good: the same command does not continue it."""
    signal: str = ""
    """Name of the signal that asked for it."""
    step: int | None = None
    """Completed steps; None if training did not begin."""
    rank: int = 0
    """Rank that failed, or the first that stopped moving; 0 if none did."""
    host: str = Factory(socket.gethostname)
    """Machine of that rank."""
    attempt: str = Factory(lambda: os.environ.get(ATTEMPT, ""))
    started: float | None = None
    """Seconds since 1970."""
    ended: float = Factory(time.time)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        """The end that `end.json` has; keys of a later version are left out."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in table.items() if name in known})
