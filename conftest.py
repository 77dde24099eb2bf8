"""Fixtures for every test, the plugins' included."""

import gc
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path += [str(Path(__file__).parent / name) for name in ("tests", "tools")]

import catalogs
import forked_starts
import published_outputs
import watched

# A busy machine is not an error: an example may take as long as it takes. They are others in every run, so that few of
# them find in time what many would.
settings.register_profile("patient", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

pytest_plugins = ["forge_testing.fixtures", "command_line"]


WITHOUT_BYTECODE = sys.dont_write_bytecode
# For as long as tests are collected: rewriting the assertions of all files takes each process ten seconds, the next
# time too unless the outcome is kept. While tests run, it is as the environment wants it.
sys.dont_write_bytecode = False
# Likewise: torch and tests that are collected stay, so that each garbage collection goes through more objects and frees
# none, which takes a fifth of that time.
gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    try:
        return (yield)
    finally:
        gc.enable()
        sys.dont_write_bytecode = WITHOUT_BYTECODE


def pytest_configure(config: pytest.Config) -> None:
    gc.callbacks.append(_note_full_collection)
    forked_starts.install()
    catalogs.install()
    published_outputs.install()
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # `pytest_collection_modifyitems` orders files
    config.addinivalue_line("markers", "thorough: tries the tests themselves; see tests/watched.py for when it runs")


def pytest_report_header() -> str:
    reason = watched.reason_to_run()
    return f"thorough tests: run, {reason}" if reason else f"thorough tests: left out; run them with {watched.ALL}=all"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _spread_slow_files(items)
    if not watched.reason_to_run():
        left_out = pytest.mark.skip(reason=f"what it watches is unchanged since it passed; {watched.ALL}=all runs it")
        for item in items:
            if item.get_closest_marker("thorough"):
                item.add_marker(left_out)


def _spread_slow_files(items: list[pytest.Item]) -> None:
    """Put files that have slow tests among the first, one in four, and the others by how many tests they have.

    Processes of a parallel run take files in this order. pytest-xdist's own order, by the number of tests, would leave
    the slow ones, which have few, to the end, when a process that has none left waits for the others; and slow tests
    mostly wait, so that cores would be idle if all ran at once.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    ordered = sorted(files.values(), key=len, reverse=True)
    slow = [file for file in ordered if any(item.get_closest_marker("slow") for item in file)]
    others = iter([file for file in ordered if file not in slow])
    spread = [file for one in slow for file in (one, *islice(others, 3))]
    items[:] = [item for file in (*spread, *others) for item in file]


@pytest.fixture(scope="module", autouse=True)
def no_groups_left() -> Iterator[None]:
    """End the process groups that a file's tests leave: each has three threads that wake a hundred times per second."""
    yield
    if "torch.distributed" in sys.modules:
        from forge_core.parallel.mesh import leave_group

        leave_group()


heap_has_grown = True
"""Whether Python has gone through all objects, on request or since there were many new ones, since they were frozen."""


def _note_full_collection(phase: str, info: dict[str, int]) -> None:
    global heap_has_grown
    heap_has_grown |= phase == "stop" and info["generation"] == 2


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Freeze all objects that outlive a test, modules above all, so that the garbage collector skips them.

    Each run collects garbage when it begins, and going through all of torch takes a third of a second: longer than most
    runs here.
    """
    global heap_has_grown
    if heap_has_grown:
        gc.collect()  # garbage of earlier tests: frozen, it would never be freed
        gc.freeze()
        heap_has_grown = False
