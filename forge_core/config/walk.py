"""The components of a job, wherever they stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from attrs import Attribute

from forge_core.contracts.components import Component

_FACTORY: Any = attrs.Factory


def walk_components(job: Any) -> Iterator[tuple[str, Component]]:
    """Every component with its path (`model.ffn.router`, `data.sources.0`), a component before those inside it.

    Args:
        job: a `Job`, or any part of one; paths are relative to it.
    """
    for path, value in _walk(job, ""):
        if isinstance(value, Component):
            yield path, value


def _walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, value
    for key, child in children(value):
        yield from _walk(child, f"{path}.{key}" if path else key)


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """The keys below a value of the job and what stands there."""
    if attrs.has(type(value)):
        yield from ((key, getattr(value, f.name)) for key, f in key_fields(type(value)).items())
    elif isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), item) for index, item in enumerate(value))


def key_fields(cls: type) -> dict[str, Attribute]:
    """The fields of an attrs class that are keys of a job, by key, with those of its bases last. State of hooks and
    plugins is none."""
    own_first = sorted(attrs.fields(cls), key=lambda field: field.inherited)
    return {f.alias or f.name: f for f in own_first if f.init}


def default_of(f: Attribute) -> Any:
    """Default of a field, or `NOTHING` if there is none or it depends on the other fields."""
    default: Any = f.default
    if isinstance(default, _FACTORY):
        return attrs.NOTHING if default.takes_self else default.factory()
    return default
