"""From TOML files, overrides or tables to a `Job` or a component, or to every problem that they have; and back."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import attrs
import tomli_w

from forge_core.config.keys import children
from forge_core.config.rules import check_rules
from forge_core.config.structure import INVALID, complete_value, structure
from forge_core.config.tree import Node, Overrides, Source, annotate, apply_overrides, clip, read_job, read_text
from forge_core.contracts.components import Component, DefaultType, Unavailable
from forge_core.contracts.errors import JobError, Problem
from forge_core.job import ALWAYS, Job
from forge_core.launch.world import join_world
from forge_core.plugins.catalog import CORE, Catalog, install_line

MODEL_TABLES = ("model", "data.tokenizer", "plugins")  # of a job that the use of its trained model needs


def load_job(
    *sources: Source,
    overrides: Overrides = (),
    catalog: Catalog | None = None,
    world_size: int | None = None,
    with_data: bool = True,
) -> Job:
    """The job of one TOML file, or of several layered left to right; from Python, of texts and tables too.

    Args:
        *sources: paths, texts of TOML (strings with a line break), and tables (dicts), each over those before it.
        overrides: `section.key=value`, as on the command line, or a dict of such keys; applied last.
        catalog: which components there are; by default those that are installed.
        world_size: number of ranks it shall run on; by default those that this process was started as one of.
        with_data: whether what the job reads (data sources, a tokenizer, weights to start from) must be there.

    Raises:
        JobError: the job cannot run as written; lists every problem.
        TypeError: a source is something else.
    """
    catalog = catalog or Catalog.installed()
    world_size = world_size or join_world().size
    root, problems = read_job(sources, overrides)
    _add_always(root)  # to the tree and not to the job, so that their keys are known to hints about misplaced ones
    for _ in range(9):  # the keys that are clipped first determine what remains for the next one
        job, findings = structure(root, Job, catalog)
        broken = [*problems, *findings.problems]
        if job is not INVALID:  # also with problems: rules are checked on all that could be read
            broken += _broken_rules(job, catalog, world_size, with_data, root, broken)
        if not (clipped := list(clip(root, broken))):
            break
        for line in clipped:
            warnings.warn(line, stacklevel=1)
    if problems := broken:
        # In the order in which a reader meets them
        problems.sort(key=lambda problem: ((origin := root.innermost(problem.path).origin).layer, origin.line))
        raise JobError([*problems, *install_line(findings.missing)])
    for warning in findings.deprecated:
        warnings.warn(warning, stacklevel=1)  # its place is in the text, and not in the code
    return job


def parse_job(
    text: str, source: str, catalog: Catalog | None = None, needed: tuple[str, ...] = ("",), *overrides: Overrides
) -> Job:
    """A resolved job from TOML that `dump_job` wrote, as a run folder or a checkpoint keeps it, with keys changed.

    Rules across fields are not checked: the data that a job trains on need not exist to use the model that it trained.
    Nor need components outside the tables `needed` (`MODEL_TABLES` for a model): what cannot be read is `Unavailable`.

    Raises:
        JobError: a component is not installed, or this version lacks a key.
    """
    root = read_text(text, source)
    problems = [problem for each in overrides for problem in apply_overrides(root, each, 1)]
    job, findings = structure(root, Job, catalog or Catalog.installed(), needed)
    if problems := [*problems, *findings.problems]:
        raise JobError([*problems, *install_line(findings.missing)])
    return job


def complete(job: Job, catalog: Catalog | None = None) -> Job:
    """A job made in Python, with each `default_type` replaced by its component and the core's own entries added.

    `load_job` and `Trainer` do this themselves. Rules across fields are not checked.

    Raises:
        JobError: default components are not installed; lists the path of each.
    """
    if job.checked:  # from a file: it has been completed
        return job
    tables: dict[str, Any] = {
        section: {name: DefaultType(f"{CORE}/{name}") for name in names} | dict(getattr(job, section))
        for section, names in ALWAYS.items()
    }
    completed, problems = complete_value(attrs.evolve(job, **tables), catalog or Catalog.installed())
    if problems:
        raise JobError(problems)
    return completed


def _add_always(root: Node) -> None:
    """Add the core's own entries to the tree, before the job's entries, which may configure them."""
    for section, names in ALWAYS.items():
        table = root.value.setdefault(section, Node({}, root.origin))
        if isinstance(table.value, dict):
            # Qualified: another distribution with a type of this name must not disturb a job that does not name it.
            types = {name: {"type": f"{CORE}/{name}"} for name in names}
            table.value = annotate(types, {}, table.origin).value | table.value


def _broken_rules(
    job: Job, catalog: Catalog, world_size: int, with_data: bool, root: Node, known: list[Problem]
) -> Iterator[Problem]:
    # Not those about a table where something is wrong already: a default may stand in there for what the user meant.
    doubtful = {problem.path.rpartition(".")[0] for problem in known}
    for problem in check_rules(job, catalog, world_size, with_data):
        at = f"{problem.path}."
        if not any(not table or at.startswith(f"{table}.") or f"{table}.".startswith(at) for table in doubtful):
            node = root.innermost(problem.path)
            origin = problem.origin or str(node.origin)
            yield attrs.evolve(problem, message=problem.message + _beside_job(node), origin=origin)


def _beside_job(node: Node) -> str:
    """The end of a message about a path that is not there: where it exists, if that is beside the job file."""
    value = str(node.value)
    path = os.path.join(os.path.dirname(node.origin.source), value)
    is_beside = os.path.exists(path) and not os.path.exists(value or ".")
    return f"; {path} exists beside the job file: write that path, or start forge-run in that folder" * is_beside


def dump_job(job: Job, catalog: Catalog | None = None) -> str:
    """The resolved job: every key, every `type` qualified by its distribution. `load_job` reads it back equal.

    Keys that are None are left out, as TOML has no null; `None` is only ever the default of a field.
    """
    return tomli_w.dumps(to_toml(job, catalog or Catalog.installed()), multiline_strings=False)


def to_toml(value: Any, catalog: Catalog) -> Any:
    """A part of a job as the plain types that TOML has."""
    if isinstance(value, DefaultType):
        return {"type": value.type}
    if isinstance(value, Unavailable):
        return value.table
    if attrs.has(type(value)) or isinstance(value, Mapping):
        type_ = {"type": catalog.type_of(type(value))} if isinstance(value, Component) else {}
        return type_ | {key: to_toml(item, catalog) for key, item in children(value) if item is not None}
    if isinstance(value, list | tuple):
        return [to_toml(item, catalog) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((to_toml(item, catalog) for item in value), key=repr)  # equal sets are written equally
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, PurePath) else value
