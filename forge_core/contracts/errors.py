"""The errors a user can meet, how they suggest a spelling, and the exit codes of `forge-run`."""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, Self

from attrs import evolve, frozen


class ExitCode(IntEnum):
    """Exit status of the process, for schedulers."""

    FINISHED = 0
    FAILED = 1
    BAD_JOB = 2
    STOPPED = 75
    """Stopped by request, with everything saved: start again to continue."""
    NON_FINITE = 76
    """Stopped by the non-finite policy."""
    SECOND_SIGNAL = 130


LEFT_OUT: Any = object()
"""`Problem.fits` of a key in an array of tables whose entry a shorter run does without."""


@frozen
class Problem:
    """One mistake in a job.

    `path` is the TOML path of the key at fault, which a component states relative to its own table (`lr`). `origin` is
    where the job has it, filled in by its reader: `job.toml:12`, or the command-line flag.
    """

    path: str
    message: str
    origin: str = ""
    fits: Any = None
    """For a key that requires more than `train.steps`: the value that fits, or `LEFT_OUT`. If a later layer has
    shortened the run, this value is used, with a warning."""
    id: str = "refused"
    """Kind of mistake, which `forge-run explain` takes: set where a job is read, and this one for all rules."""
    suggestion: str | None = None
    """For programs: what may replace the key or the value at fault, or a command; None if nothing is likely."""

    def below(self, prefix: str) -> Problem:
        """The same problem, with its path below `prefix`."""
        return evolve(self, path=".".join(filter(None, (prefix, self.path))))

    def __str__(self) -> str:
        return ": ".join(part for part in (self.origin, self.path, self.message) if part)


class ForgeError(Exception):
    """Base of every error that Forge raises on purpose; `exit_code` is what `forge-run` exits with."""

    exit_code = ExitCode.FAILED


class JobError(ForgeError):
    """The job cannot run as written. Carries every problem, not only the first."""

    exit_code = ExitCode.BAD_JOB

    def __init__(self, problems: Iterable[Problem] | str) -> None:
        self.problems = [Problem("", problems)] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @classmethod
    def at(cls, path: str, message: str, origin: str = "") -> Self:
        """The error of a single problem."""
        return cls([Problem(path, message, origin)])


class PluginError(JobError):
    """An installed component or plugin that the job names cannot be used."""


class NonFiniteError(ForgeError):
    """Loss or gradients were not finite, or updates left out, for longer than the job or a hook allows."""

    exit_code = ExitCode.NON_FINITE


class DataError(ForgeError):
    """Training data cannot be read; names the source, the sample and the file."""


class CheckpointError(ForgeError):
    """A checkpoint is missing, damaged, or cannot be written, or the job cannot continue from it (`ResumeError`)."""


class ResumeError(CheckpointError):
    """The job, or the command, cannot continue from an existing checkpoint; nothing has been changed."""

    exit_code = ExitCode.BAD_JOB


_NO_MEMORY = re.compile(r"out of memory|(can't|cannot|unable to) allocate|not enough memory|size .*overflowed", re.I)


def memory_words(error: BaseException) -> str:
    """An allocator's own words, if memory of the host or of a device ran out; empty for any other error."""
    if isinstance(error, ForgeError) or not (isinstance(error, MemoryError) or _NO_MEMORY.search(str(error))):
        return ""
    words = re.sub(r"^\[enforce fail at .*?\] .*?\. ", "", str(error).partition("\n")[0])  # torch's lines of C++
    return re.sub(r"\d{7,}(?= bytes)", lambda digits: f"{int(digits[0]):,}", words) or "Python has no more of it"


def disk_words(error: BaseException) -> str:
    """The fix when a disk is full or a quota is used up; empty for any other error."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    try:
        os.write(1, b" ")  # fails again if it was standard output: errors of open files have no name
    except OSError as failure:
        if failure.errno == error.errno:
            return f"{error.strerror}, writing standard output: free space, or send it elsewhere"
    return (
        f"{error.strerror}, writing {error.filename or 'a file'}: "
        "free space or inodes (df -i), or name another disk in job.output"
    )


def in_words(error: BaseException, speaker: str = "forge-run") -> str:
    """The text to show for an error of ours, for memory that ran out, or a full disk; empty for what needs a trace."""
    words = memory_words(error)
    text = str(error) if isinstance(error, ForgeError) else (words and f"memory ran out: {words}") or disk_words(error)
    # An error of the job is the same on every rank, and complete without the number of one
    return text if isinstance(error, JobError) or not text else f"{speaker}: {text}"


SURE = 0.8
"""Minimum similarity at which a word is more likely a misspelling than a different word."""


SHOWN = 8
"""Names that a message lists; the rest are counted."""


def listed(names: Sequence[object], shown: int = SHOWN) -> str:
    """Names, or numbers of ranks, for a message: the first few of many."""
    return ", ".join(map(str, names[:shown])) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def closest(word: str, options: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar option, or None if none is similar enough; case and dashes are ignored."""
    plain = {_plain(option): option for option in sorted(options)}
    matches = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=cutoff)
    return plain[matches[0]] if matches else None


def did_you_mean(word: str, options: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of an error message, `; did you mean 'momentum'?`; empty if no option is similar enough."""
    option = closest(word, options, cutoff)
    return f"; did you mean {option!r}?" if option else ""


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")
