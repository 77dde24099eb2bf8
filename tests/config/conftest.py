"""The small catalog of `job_parts`, and jobs written into a temporary folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forge_core.config.load import load_job
from forge_core.contracts.errors import JobError, Problem
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog

sys.path.insert(0, str(Path(__file__).parent))  # for `job_parts`

GOOD = (Path(__file__).parent / "broken" / "good.toml").read_text()


@pytest.fixture
def small_catalog() -> Catalog:
    """Components whose names and keys do not depend on what is installed."""
    from job_parts import make_catalog

    return make_catalog()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a job file into a temporary folder, which is also the working directory."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str, name: str = "job.toml") -> Path:
        Path(name).write_text(text)
        return Path(name)

    return write_file


@pytest.fixture
def load(write: Callable[..., Path], small_catalog: Catalog) -> Callable[..., Job]:
    """Load a good job with the given text layered over it, and overrides."""

    def load_over_good(text: str = "", *overrides: str, world_size: int = 1) -> Job:
        files = [write(GOOD, "good.toml"), write(text)]
        return load_job(*files, overrides=overrides, catalog=small_catalog, world_size=world_size)

    return load_over_good


@pytest.fixture
def problems(load: Callable[..., Job]) -> Callable[..., list[Problem]]:
    """The problems of the error that loading raises."""

    def load_refused(text: str = "", *overrides: str, world_size: int = 1) -> list[Problem]:
        with pytest.raises(JobError) as caught:
            load(text, *overrides, world_size=world_size)
        return caught.value.problems

    return load_refused
