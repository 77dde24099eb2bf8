"""Writing a job back as TOML, with every default filled in."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import attrs
import tomli_w

from forge_core.config.walk import children
from forge_core.contracts.components import Component, DefaultType
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog


def dump_job(job: Job, catalog: Catalog | None = None) -> str:
    """The resolved job: every key, every `type` qualified by its distribution. `load_job` reads it back equal.

    Keys that are None are left out, as TOML has no null; `None` is only ever the default of a field.
    """
    return tomli_w.dumps(to_toml(job, catalog or Catalog.installed()), multiline_strings=False)


def to_toml(value: Any, catalog: Catalog) -> Any:
    """A part of a job as the plain types that TOML has."""
    if isinstance(value, DefaultType):
        return {"type": value.type}
    if isinstance(value, Component):
        return {"type": catalog.type_of(type(value)), **_table(value, catalog)}
    if attrs.has(type(value)) or isinstance(value, Mapping):
        return _table(value, catalog)
    if isinstance(value, list | tuple):
        return [to_toml(item, catalog) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((to_toml(item, catalog) for item in value), key=repr)
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, PurePath) else value


def _table(value: Any, catalog: Catalog) -> dict[str, Any]:
    return {key: to_toml(item, catalog) for key, item in children(value) if item is not None}
