"""One component, for commands that need it without the rest of a job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from forge_core.config.read import read_job
from forge_core.config.structure import structure
from forge_core.config.tree import Node, Origin, annotate
from forge_core.config.unknown import explain_unknown
from forge_core.contracts.components import Component
from forge_core.contracts.errors import JobError, Problem
from forge_core.plugins.catalog import Catalog, install_line

C = TypeVar("C", bound=Component)


def load_component(
    table: str, base: type[C], catalog: Catalog, paths: Sequence[str | Path] = (), overrides: Iterable[str] = ()
) -> C:
    """The component that the table of this name (`data.tokenizer`) describes in TOML files and overrides.

    Everything else that the files hold is passed over; rules across sections are not checked.

    Raises:
        JobError: there is no such table, or it cannot be read; tells every problem.
    """
    root, problems = read_job(paths, overrides)
    nodes = list(root.along(table))
    if len(nodes) <= len(table.split(".")):
        missing = Problem(table, "required table is missing; add it with a type", str(root.origin))
        raise JobError([*problems, missing])
    return _component(nodes[-1], table, base, catalog, problems)


def parse_component(table: Mapping[str, Any], source: str, base: type[C], catalog: Catalog) -> C:
    """The component that a table describes, as a job would have it, or `to_toml` has written it.

    Args:
        source: where the table is from, for messages.

    Raises:
        JobError: it cannot be read; tells every problem.
    """
    return _component(annotate(table, {}, Origin(source)), "", base, catalog, [])


def _component(node: Node, path: str, base: type[C], catalog: Catalog, known: list[Problem]) -> C:
    component, findings = structure(node, base, catalog)
    unknown = [explain_unknown(key, findings, node, catalog) for key in findings.unknown]
    problems = [*known, *(problem.below(path) for problem in [*findings.problems, *unknown])]
    if problems:
        raise JobError([*problems, *install_line(findings.missing)])
    return component
