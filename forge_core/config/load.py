"""`load_job`: from TOML files and overrides to a `Job`, or to every problem that they have, at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from forge_core.config.job import ALWAYS, Job
from forge_core.config.read import read_job
from forge_core.config.rules import check_rules
from forge_core.config.structure import INVALID, Findings, complete, structure
from forge_core.config.tree import Node
from forge_core.config.unknown import explain_unknown
from forge_core.errors import JobError, Problem
from forge_core.plugins.catalog import Catalog


def load_job(
    *paths: str | Path, overrides: Iterable[str] = (), catalog: Catalog | None = None, world_size: int = 1
) -> Job:
    """The job of one TOML file, or of several layered left to right.

    Args:
        overrides: `section.key=value`, as on the command line; applied after the files.
        catalog: which components there are; by default those that are installed.
        world_size: number of ranks it shall run on.

    Raises:
        JobError: the job cannot run as written; tells every problem that was found.
    """
    catalog = catalog or Catalog.installed()
    root, problems = read_job(paths, overrides)
    _add_always(root)
    job, findings = structure(root, Job, catalog)
    problems += findings.problems
    problems += [explain_unknown(found, findings, root, catalog) for found in findings.unknown]
    if job is not INVALID:
        problems += _broken_rules(job, catalog, world_size, root, problems)
    if problems:
        problems.sort(key=lambda problem: _place(root, problem))
        raise JobError([*problems, *_to_install(findings)])
    return job


def complete_job(job: Job, catalog: Catalog | None = None, world_size: int = 1) -> Job:
    """A job made in Python as `load_job` would give it: default components filled in, and every rule checked.

    Raises:
        JobError: as `load_job`.
    """
    catalog = catalog or Catalog.installed()
    completed, findings = complete(job, catalog)
    problems = findings.problems or check_rules(completed, catalog, world_size)
    if problems:
        raise JobError([*problems, *_to_install(findings)])
    return completed


def _add_always(root: Node) -> None:
    for section, names in ALWAYS.items():
        table = root.value.setdefault(section, Node({}, root.origin))
        if isinstance(table.value, dict):
            table.value = {name: Node({}, table.origin) for name in names} | table.value


def _broken_rules(job: Job, catalog: Catalog, world_size: int, root: Node, known: list[Problem]) -> Iterator[Problem]:
    """Rules that the job breaks, but for those about a table where something is wrong already: there, a default may
    stand in for what the user meant."""
    doubtful = {problem.path.rpartition(".")[0] for problem in known}
    for problem in check_rules(job, catalog, world_size):
        if not any(_related(problem.path, table) for table in doubtful):
            yield Problem(problem.path, problem.message, problem.origin or str(root.origin_of(problem.path)))


def _related(path: str, table: str) -> bool:
    """Whether one is the other or lies below it."""
    return not table or f"{path}.".startswith(f"{table}.") or f"{table}.".startswith(f"{path}.")


def _place(root: Node, problem: Problem) -> tuple[int, int]:
    origin = root.origin_of(problem.path)
    return origin.layer, origin.line


def _to_install(findings: Findings) -> list[Problem]:
    names = dict.fromkeys(name for name in findings.missing if name)
    return [Problem("", f"to install what is missing: pip install {' '.join(names)}")] if names else []
