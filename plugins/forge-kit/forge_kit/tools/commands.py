"""For commands of plugins: single components, of a job's files or a table, and paragraphs of text."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from forge_core.config.structure import structure
from forge_core.config.tree import Node, Origin, annotate, read_job
from forge_core.contracts.components import Component
from forge_core.contracts.errors import JobError, Problem
from forge_core.plugins.catalog import Catalog, install_line

C = TypeVar("C", bound=Component)
WIDTH = 100


def load_component(
    table: str, base: type[C], catalog: Catalog, paths: Sequence[str | Path] = (), overrides: Iterable[str] = ()
) -> C:
    """The component that one table (`data.tokenizer`) of job files and overrides describes, by its base class.

    Everything else in the files is ignored, and rules across sections are not checked.

    Raises:
        JobError: the table is missing or invalid; lists every problem.
    """
    root, problems = read_job(paths, overrides)
    # The root, and a node for each key of the path that exists
    nodes = list(root.along(table))
    if len(nodes) <= len(table.split(".")):
        raise JobError([*problems, Problem(table, "required table is missing; add it with a type", str(root.origin))])
    return _structured(nodes[-1], table, base, catalog, problems)


def parse_component(table: Mapping[str, Any], source: str, base: type[C], catalog: Catalog) -> C:
    """The component that a table describes, as a job has it and `to_toml` writes it; `source` names its file.

    Raises:
        JobError: the table is invalid; lists every problem.
    """
    return _structured(annotate(table, {}, Origin(source)), "", base, catalog, [])


def _structured(node: Node, path: str, base: type[C], catalog: Catalog, known: list[Problem]) -> C:
    component, findings = structure(node, base, catalog)
    if problems := [*known, *(problem.below(path) for problem in findings.problems)]:
        raise JobError([*problems, *install_line(findings.missing)])
    return component


def count(text: str) -> int:
    """Type of a number or seed of at most 64 bits that is at least 0, for `add_argument(type=…)`."""
    if not 0 <= (value := int(text)) < 1 << 63:
        allowed = "at least 0" if value < 0 else f"at most {(1 << 63) - 1}"
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {text}")
    return value


def gigabytes(text: str) -> int:
    """Type of a size in GB of at least a byte, for `add_argument(type=…)`; returns bytes."""
    size = float(text) * 1e9
    if not 1 <= size < math.inf:  # false for NaN, too
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text}")
    return round(size)


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph in lines of moderate width."""
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
