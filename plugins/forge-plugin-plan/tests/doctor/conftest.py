from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_plugin_plan.doctor.results import Result, State, Surroundings


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, and a cache in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def around(here: Path) -> Callable[..., Surroundings]:
    """Surroundings with changes: of the environment, and without ranks."""

    def make(environment: dict[str, str] | None = None, **changes: Any) -> Surroundings:
        plain: dict[str, Any] = {
            "output": here / "runs",
            "cache": here / "cache",
            "environment": {"PATH": os.environ["PATH"], **(environment or {})},
            "files": [],
            "overrides": [],
            "world_size": 1,
            "ranks": SimpleNamespace(facts=dict, lines=lambda: [[]], trouble=list, count=2, limit_s=1.0),
        }
        return Surroundings(**plain | changes)

    return make


@pytest.fixture
def states() -> Callable[..., dict[str, State]]:
    """Results -> the state of each, by name."""
    return lambda results: {result.name: result.state for result in results}


@pytest.fixture
def one() -> Callable[..., Result]:
    """Results and a name -> the result of this name."""
    return lambda results, name: next(result for result in results if result.name == name)


@pytest.fixture
def program(here: Path) -> Callable[[str, str], str]:
    """Write an executable shell script into a folder; returns a PATH on which it comes first."""

    def write(name: str, script: str) -> str:
        path = here / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return f"{path.parent}:{os.environ['PATH']}"

    return write
