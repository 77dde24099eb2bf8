"""What dstack's own classes say of keys and documents. Importing them takes a second, so that only this module does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstack.api import Task
from pydantic import ValidationError

from forge_plugin_launch.remote.yaml_text import plain


def problem_of(keys: Mapping[str, Any]) -> str:
    """Returns why a task with these keys is none of dstack; empty if it is one."""
    try:
        _task(keys)
    except ValidationError as error:
        # Of a union each member has errors; the one that got furthest is about what was meant
        first = max(error.errors(), key=lambda each: len(each["loc"]))
        where = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier())
        return f"{where}: {first['msg'].removeprefix('Value error, ')}"
    return ""


def gpu_counts(resources: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The least and the largest number of GPUs of a node; None: open."""
    # dstack's own reading of "H100:8", "nvidia:24GB:2..4", tables and numbers
    count = _task({"resources": resources}).resources.gpu.count
    return count.min, count.max


def mounts(volumes: tuple[str, ...]) -> dict[str, bool]:
    """By path on the nodes: whether it is a folder of the instance, which may be of a file system that nodes share."""
    found = _task({"volumes": volumes}).volumes
    return {point.path: not hasattr(point, "name") for point in found}


def copies(files: tuple[str, ...]) -> dict[str, str]:
    """Path on this machine by path on the nodes."""
    return {each.path: each.local_path for each in _task({"files": files}).files}


def _task(keys: Mapping[str, Any]) -> Any:
    return Task.model_validate({"type": "task", "commands": ["true"], **plain(keys)})
