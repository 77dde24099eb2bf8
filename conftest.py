"""Fixtures for every test, the plugins' included."""

import gc
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.append(str(Path(__file__).parent / "tests"))

import watched

# A busy machine is not an error: an example may take as long as it takes.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

pytest_plugins = ["forge_testing.fixtures", "command_line"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "thorough: tries the tests themselves; see tests/watched.py for when it runs")


def pytest_report_header() -> str:
    reason = watched.reason_to_run()
    return f"thorough tests: run, {reason}" if reason else f"thorough tests: left out; run them with {watched.ALL}=all"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not watched.reason_to_run():
        left_out = pytest.mark.skip(reason=f"what it watches is unchanged since it passed; {watched.ALL}=all runs it")
        for item in items:
            if item.get_closest_marker("thorough"):
                item.add_marker(left_out)


@pytest.fixture(scope="module", autouse=True)
def young_heap() -> None:
    """Freeze all objects imported so far, so that the garbage collector skips them.

    Each run collects garbage when it begins and ends, and going through all of torch takes a third of a second: longer
    than most runs here.
    """
    gc.collect()
    gc.freeze()
