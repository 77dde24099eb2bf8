"""Command lines run in this process over the small catalog, or in a process of their own over what is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forge_core.cli import main
from forge_core.plugins.catalog import Catalog

CONFIG = Path(__file__).parent / "config"
sys.path.insert(0, str(CONFIG))  # for `job_parts`

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def good_job() -> Path:
    """A job that is right, over the small catalog."""
    return CONFIG / "broken" / "good.toml"


@pytest.fixture
def small_catalog(monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """The catalog that `forge-run` finds in this process."""
    from job_parts import make_catalog

    catalog = make_catalog()
    monkeypatch.setattr(Catalog, "installed", classmethod(lambda cls: catalog))
    return catalog


@pytest.fixture
def forge_run(small_catalog: Catalog, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process: exit code, standard output, standard error."""

    def run(*argv: str) -> tuple[int, str, str]:
        try:
            code = main(list(argv))
        except SystemExit as end:
            code = int(end.code or 0)
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python in a process of its own; `path` comes first on its `sys.path`."""

    def run(*argv: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
        entries = [str(path)] if path else []
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*entries, os.environ.get("PYTHONPATH", "")])}
        return subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=environment, check=False)

    return run
