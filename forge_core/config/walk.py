"""The components of a job, wherever they stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from forge_core.components import Component


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
    """The keys below a value of the job and what stands there; state of hooks and plugins is not part of a job."""
    if attrs.has(type(value)):
        yield from ((f.alias, getattr(value, f.name)) for f in attrs.fields(type(value)) if f.init)
    elif isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), item) for index, item in enumerate(value))
