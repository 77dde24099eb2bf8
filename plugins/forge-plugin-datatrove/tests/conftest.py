from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from forge_core.cli import main

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, from which the modules of a user's own steps are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def data(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """`data("filter")` runs the command on `clean.toml` and returns its JSON; with `code`, its standard error."""

    def run(command: str, *options: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert main(["data", command, "clean.toml", "--json", *options]) == code, capsys.readouterr().err
        out, err = capsys.readouterr()
        return json.loads(out) if code == 0 else err

    return run
