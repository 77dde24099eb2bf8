"""Results of checks, and the surroundings that checks look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from forge_plugin_plan.doctor.ranks import Ranks


class State(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    WARNING = "warning"
    """Training works, but slower, or not everywhere."""
    FAILED = "failed"
    """Training does not work, or cannot be trusted."""
    NOT_RUN = "not run"
    """The check could not look; nothing is known."""


@frozen
class Result:
    """One line of the report."""

    name: str
    state: State
    seen: str
    """What the check saw."""
    mend: str = ""
    """How to fix the problem, in one line; empty if there is none."""


def ok(name: str, seen: str) -> Result:
    """Returns a result that needs no fix."""
    return Result(name, State.OK, seen)


def warning(name: str, seen: str, mend: str) -> Result:
    """Returns a result that a user should know of."""
    return Result(name, State.WARNING, seen, mend)


def failed(name: str, seen: str, mend: str) -> Result:
    """Returns a result that makes the exit code 1."""
    return Result(name, State.FAILED, seen, mend)


def not_run(name: str, why: str, mend: str = "") -> Result:
    """Returns the result of a check that could not look."""
    return Result(name, State.NOT_RUN, why, mend)


@frozen(kw_only=True)
class Surroundings:
    """Everything that checks look at, so that tests can give them other ones."""

    output: Path
    """Folder of run folders; need not exist."""
    cache: Path
    """Forge's cache; need not exist."""
    environment: Mapping[str, str]
    files: Sequence[str]
    """Job files; none: no job is checked."""
    overrides: Sequence[str]
    world_size: int
    ranks: Ranks
    """The processes that try collectives, started before the first check."""


Check = Callable[[Surroundings], Iterable[Result]]
