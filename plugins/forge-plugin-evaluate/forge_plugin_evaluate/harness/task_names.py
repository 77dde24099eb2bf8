"""Tasks of a harness by their names and globs."""

from __future__ import annotations

from typing import Any

from forge_core.contracts.errors import JobError, Problem, did_you_mean


def matching_tasks(manager: Any, names: str, harness: str) -> list[str]:
    """Returns the tasks that names and globs, with commas between, mean to a harness' manager of tasks.

    Raises:
        JobError: one of them means none.
    """
    found: dict[str, None] = {}
    problems = []
    for name in filter(None, map(str.strip, names.split(","))):
        matches = manager.match_tasks([name])
        found |= dict.fromkeys(matches)
        if not matches:
            message = f"{harness} has no task {name!r} (your own are in a folder named by --include)"
            problems.append(Problem("--tasks", message + did_you_mean(name, manager.all_tasks)))
    if problems or not found:
        raise JobError(problems or "--tasks names none")
    return list(found)
