"""Facts about an attempt that only its log has: the words of SLURM and of srun.

While processes of a job are left, the controller calls its state COMPLETING, whatever ended it. The reason is in a line
that SLURM writes into the log of the batch script, in this form since version 14.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from attrs import Factory, frozen

TAIL = 1 << 20
"""Bytes that are read of the log of an attempt, from its end."""
_JOB = re.compile(r"\*\*\* JOB \S+ ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+[A-Z]))?")
_NODE = re.compile(r"srun: error: Node failure on (\S+)")
_TASKS = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (.+)")
_QUIET = ("Exited with exit code", "Terminated")
"""Ends of a task that say nothing about its machine."""


@frozen(kw_only=True)
class LogFacts:
    """Facts about one attempt; empty where its log does not mention them."""

    ended_by_slurm: bool = False
    """Whether SLURM ended the job, for any reason: a limit, a failure, `scancel`."""
    due_to: str = ""
    """`TIME LIMIT`, `PREEMPTION`, `NODE FAILURE` or `JOB REQUEUE`; empty for `scancel`."""
    failed_nodes: tuple[str, ...] = ()
    killed: Mapping[int, tuple[str, str]] = Factory(dict)
    """Node and cause (`Killed`) of each task that did not exit by itself, if it was the first to end."""
    hosts: Mapping[int, str] = Factory(dict)
    """Node of each task that ended with an error."""


def read_log(path: Path | None, offset: int) -> LogFacts:
    """Reads the part of a log that an attempt has written, from `offset` on."""
    if path is None:
        return LogFacts()
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            # `min`, as somebody may have truncated the log since the attempt began
            file.seek(max(min(offset, size), size - TAIL))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return LogFacts()
    return facts_of(text)


def facts_of(text: str) -> LogFacts:
    """Reads the facts from the text of a log."""
    ends = _JOB.findall(text)
    hosts = {task: node for node, tasks, _ in _TASKS.findall(text) for task in _numbers(tasks)}
    killed: dict[int, tuple[str, str]] = {}
    for node, tasks, cause in _TASKS.findall(text):
        if cause.startswith(_QUIET):
            break  # srun kills the remaining tasks after the first end (--wait): later ends are no cause
        killed |= dict.fromkeys(_numbers(tasks), (node, cause.strip()))
    return LogFacts(
        ended_by_slurm=bool(ends),
        due_to=next(filter(None, ends), ""),
        failed_nodes=tuple(dict.fromkeys(_NODE.findall(text))),
        killed=killed,
        hosts=hosts,
    )


def _numbers(text: str) -> Iterator[int]:
    """`0-2,5` is 0, 1, 2, 5."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
