"""The output of a rank: rank 0 to the terminal, every rank to a log of its own in the run folder."""

from __future__ import annotations

import faulthandler
import io
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

LOGS = "logs"
"""In the run folder."""


def log_path(folder: Path, rank: int) -> Path:
    """The log of a rank, in a run folder."""
    return folder / LOGS / f"rank-{rank}.log"


class RankLog:
    """Sends the output of this process to terminal or log. Until the run folder is known, the log is a temporary file.

    Rank 0 goes on writing to the terminal, and what it writes to standard error (warnings, errors) goes to its log too.
    All that other ranks write goes to their logs, what libraries in C write included.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.terminal: TextIO = os.fdopen(os.dup(2), "w", errors="backslashreplace")
        """Standard error as it was, for messages that must be seen whichever rank writes them."""
        self._early: Any = tempfile.TemporaryFile("w+", errors="backslashreplace")  # noqa: SIM115
        if rank:
            self._redirect(self._early)
        else:
            sys.stderr = _Both(sys.stderr, self._early)
        faulthandler.enable(self.terminal)

    def open(self, folder: Path) -> None:
        """The run folder is there: write into it from now on."""
        path = log_path(folder, self._rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("a", buffering=1, errors="backslashreplace")
        log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}\n")
        self._early.flush()
        self._early.seek(0)
        log.write(self._early.read())
        log.flush()
        if self._rank:
            self._redirect(log)
        else:
            assert isinstance(sys.stderr, _Both)
            sys.stderr.log = log
        faulthandler.enable(log)

    def write(self, text: str) -> None:
        """Into the log only."""
        stream = sys.stderr.log if isinstance(sys.stderr, _Both) else sys.stderr
        stream.write(f"{text}\n")
        stream.flush()

    def _redirect(self, stream: Any) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)


class _Both(io.TextIOBase):
    """Standard error of rank 0: the terminal, and the log."""

    def __init__(self, terminal: TextIO, log: TextIO) -> None:
        self.terminal, self.log = terminal, log

    def write(self, text: str) -> int:
        self.terminal.write(text)
        self.log.write(text)
        return len(text)

    def flush(self) -> None:
        self.terminal.flush()
        self.log.flush()

    def fileno(self) -> int:
        """The log's: the stacks of a rank that hangs are written to it by number."""
        self.flush()
        return self.log.fileno()

    def isatty(self) -> bool:
        return self.terminal.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.terminal.encoding
