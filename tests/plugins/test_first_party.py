"""The index of first-party components that the core ships is what `plugins/` offers."""

from __future__ import annotations

import runpy
from pathlib import Path

from forge_core.plugins.catalog import first_party

ROOT = Path(__file__).parents[2]


def test_the_index_is_fresh() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "first_party.py"))
    assert tool["INDEX"].read_text() == tool["index_text"](), "run: python tools/first_party.py"


def test_it_names_distributions_that_exist() -> None:
    named = {distribution for types in first_party().values() for distribution in types.values()}
    assert named <= {folder.name for folder in (ROOT / "plugins").iterdir()}
    assert first_party()["optimizer"]["muon"] == "forge-plugin-muon"
    assert first_party()["command"]["plan"] == "forge-plugin-plan"
