"""The index of first-party components that the core ships is what `plugins/` offers."""

from __future__ import annotations

import runpy
from pathlib import Path

from workspace import distributions

from forge_core.plugins.catalog import REPLACES, first_party

ROOT = Path(__file__).parents[2]


def test_the_index_is_of_the_plugins_that_there_are() -> None:
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))
    assert (ROOT / hook["INDEX"]).read_text() == hook["index_text"](ROOT), "run: make venv"


def test_it_names_distributions_that_exist() -> None:
    named = {distribution for types in first_party().values() for distribution in types.values()}
    assert named <= {folder.name for folder in (ROOT / "plugins").iterdir()}
    assert first_party()["optimizer"]["muon"] == "forge-plugin-muon"
    assert first_party()["command"]["plan"] == "forge-plugin-plan"


def test_a_type_that_has_moved_is_where_the_index_says_and_nowhere_else() -> None:
    """A key has no kind, so the old distribution may not keep a type of another kind with this name."""
    types = {each.name: {type_ for _, names in each.offers for type_ in names} for each in distributions()}
    moved = [[*old.split("/"), new] for old, new in first_party()[REPLACES].items() if "/" in old]
    assert ["forge-plugin-images", "answers", "forge-plugin-vlm-eval"] in moved
    for old, type_, new in moved:
        assert type_ in types[new]
        assert type_ not in types[old]
