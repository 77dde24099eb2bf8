"""Filling in the defaults that only a catalog knows, in jobs that are made in Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import attrs

from forge_core.components import DefaultType
from forge_core.config.describe import component_in, item_type
from forge_core.config.job import ALWAYS, Job
from forge_core.plugins.catalog import Catalog

T = TypeVar("T")


def complete(job: Job, catalog: Catalog | None = None) -> Job:
    """The job with every `default_type` replaced by its component, and the core's own loggers and evaluation added.

    `load_job` does this by itself.

    Raises:
        PluginError: a default component is not installed.
    """
    catalog = catalog or Catalog.installed()
    added = {name: _with_always(getattr(job, name), name, catalog) for name in ALWAYS}
    return _fill(attrs.evolve(job, **added), catalog)


def _with_always(table: Mapping[str, Any], name: str, catalog: Catalog) -> Mapping[str, Any]:
    kind = item_type(attrs.fields_dict(attrs.resolve_types(Job))[name].type).kind
    return {type_: catalog.load(kind, f"forge-run/{type_}")() for type_ in ALWAYS[name] if type_ not in table} | dict(table)


def _fill(value: T, catalog: Catalog) -> T:
    if isinstance(value, tuple):
        return tuple(_fill(item, catalog) for item in value)  # type: ignore[return-value]
    if isinstance(value, Mapping):
        return {key: _fill(item, catalog) for key, item in value.items()}  # type: ignore[return-value]
    if not attrs.has(type(value)):
        return value
    changes = {}
    for field in attrs.fields(attrs.resolve_types(type(value))):
        if field.init:
            old = getattr(value, field.name)
            new = _fill(_load(old, field, catalog) if isinstance(old, DefaultType) else old, catalog)
            if new is not old and new != old:
                changes[field.alias] = new
    return attrs.evolve(value, **changes) if changes else value  # type: ignore[type-var]


def _load(default: DefaultType, field: Any, catalog: Catalog) -> Any:
    base = component_in(field.type)
    assert base is not None, f"{field.name} has a default type, but is not a component"
    return catalog.load(base.kind, default.type, base)()
