"""Fixtures for tests of components, as a pytest plugin to be named explicitly.

# conftest.py
pytest_plugins = ["forge_testing.fixtures"]
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge_core.contracts.components import TrainingHook
from forge_core.engine.build import Run, build_context, build_run
from forge_core.engine.trainer import Summary, Trainer
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_core.plugins.manager import Plugins
from forge_kit.tools.run_owner import metrics_file
from forge_testing import catalogs, tiny_job
from forge_testing.laws import TOGETHER, ranks_of
from forge_testing.processes import prepare_to_fork
from forge_testing.torch_internals import record_no_stacks


def pytest_collection_finish() -> None:
    """Prepare for `run_on_ranks` before the first test can run anything."""
    prepare_to_fork()
    record_no_stacks()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let each worker of pytest-xdist know whether the scheduler below is used."""
    node.workerinput[TOGETHER] = node.config.getoption("dist") == "loadfile"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, send all tests of laws that need the same number of ranks to one worker."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class Scheduler(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return ranks_of(nodeid) or super()._split_scope(nodeid)

    return Scheduler(config, log)


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    """Everything installed, scanned once."""
    return Catalog.installed()


@pytest.fixture
def catalog_of() -> Callable[..., Catalog]:
    """`catalogs.catalog_of`: a catalog of the core's own components and given ones only.

    The other fixtures use such a catalog if a test module overrides the fixture `catalog` by one.
    """
    return catalogs.catalog_of


@pytest.fixture
def plugins_with() -> Callable[..., Plugins]:
    """`catalogs.plugins_with`: the active plugins of a job, over such a catalog."""
    return catalogs.plugins_with


@pytest.fixture
def make_job(tmp_path: Path, catalog: Catalog) -> Callable[..., Job]:
    """`tiny_job` with its run folder in a temporary folder."""
    return lambda **changes: tiny_job(str(tmp_path), catalog, **changes)


@pytest.fixture
def train(catalog: Catalog) -> Callable[..., Summary]:
    """Train a job in this process, silently; takes the options of `Trainer`."""

    def run(job: Job, *hooks: TrainingHook, **options: Any) -> Summary:
        silent: dict[str, Any] = {"echo": lambda text: None}
        return Trainer(job, hooks=hooks, catalog=catalog, **silent | options).run()

    return run


@pytest.fixture
def build(catalog: Catalog, tmp_path: Path) -> Callable[..., Run]:
    """Build all components of a job, without training."""
    return lambda job: build_run(job, build_context(job, catalog, tmp_path))


@pytest.fixture
def lines() -> Callable[[Summary], list[dict[str, Any]]]:
    """The training lines of a finished run."""

    def read(summary: Summary) -> list[dict[str, Any]]:
        text = metrics_file(summary.folder).read_text()
        return [record for line in text.splitlines() if "loss" in (record := json.loads(line))]

    return read
