"""Fixtures for every test, the plugins' included."""

import gc
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

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

DIGESTS = pytest.StashKey[Mapping[str, str]]()
"""Of what thorough tests watch, when the session began; see tests/watched.py."""
UNCHANGED = pytest.StashKey[list[str]]()
"""Folders whose thorough tests do not run."""
GIVEN = "forge_unchanged"
"""Key of an xdist worker's input: likewise."""
CHOICES = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "collectonly")
"""Options by which a run is not of all tests."""

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
    config.addinivalue_line("markers", "thorough: see tests/watched.py for what that is, and when it runs")
    if not hasattr(config, "workerinput"):  # one of several processes gets it, since it takes seconds
        config.stash[DIGESTS] = watched.digests()
        changed = watched.changed(config.stash[DIGESTS])
        config.stash[UNCHANGED] = [folder for folder in config.stash[DIGESTS] if folder not in changed]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput[GIVEN] = node.config.stash[UNCHANGED]


def pytest_report_header(config: pytest.Config) -> str:
    changed = [folder for folder in config.stash[DIGESTS] if folder not in config.stash[UNCHANGED]]
    return f"thorough tests ({watched.ALL}=all: of all folders): {', '.join(changed) or 'of none, nothing has changed'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _spread_slow_files(items)
    given = getattr(config, "workerinput", None)
    unchanged = given[GIVEN] if given else config.stash[UNCHANGED]
    left_out = pytest.mark.skip(reason=f"what it watches is unchanged since it passed; {watched.ALL}=all runs it")
    for item in items:
        if _is_thorough(item) and watched.folder_of(item.path) in unchanged:
            item.add_marker(left_out)


def _is_thorough(item: pytest.Item) -> bool:
    """Whether a test is a check that its class or its module has from `forge_testing`, or is chosen."""
    module = getattr(getattr(item, "function", None), "__module__", "")
    chosen = watched.is_thorough(item.path) or item.get_closest_marker("thorough") is not None
    return chosen or module.startswith("forge_testing.")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not any(map(config.getoption, CHOICES))
    if whole and exitstatus == 0 and DIGESTS in config.stash and watched.record(config.stash[DIGESTS]):
        print(f"\nall tests have passed: {watched.RECORD.name} is renewed, commit it")


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
