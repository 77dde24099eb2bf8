"""Values of a job file, read from plain tables."""

from __future__ import annotations

from typing import Any

import attrs

from forge_core.config.structure import INVALID, structure
from forge_core.config.tree import Origin, annotate
from forge_core.plugins.catalog import Catalog


def read_value(value: Any, type_: Any, catalog: Catalog) -> Any:
    """Read a value as a job file would.

    Args:
        value: Plain types of TOML.
        type_: Type of the field.
        catalog: Catalog in which components are looked up.

    Returns:
        The value of the field.

    Raises:
        ValueError: The value does not fit; the message lists every problem.
    """
    holder = attrs.make_class("Holder", {"value": attrs.field(type=type_)}, frozen=True)
    read, findings = structure(annotate({"value": value}, {}, Origin("")), holder, catalog)
    problems = [f"{problem.path.removeprefix('value.')}: {problem.message}" for problem in findings.problems]
    if problems or read is INVALID:
        raise ValueError("; ".join(problems))
    return read.value
