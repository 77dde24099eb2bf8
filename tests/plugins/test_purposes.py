"""The page of packages is generated from the folders of `plugins/`, by the purpose that each of them names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from workspace import PURPOSES, ROOT, Distribution, distributions, package_tables, purpose_problems, write_packages


@pytest.fixture
def plugin(tmp_path: Path):
    """A function that returns a plugin whose pyproject.toml has these lines."""

    def make(lines: str) -> Distribution:
        project = '[project]\nname = "forge-plugin-new"\ndescription = "New for Forge."\n'
        (tmp_path / "pyproject.toml").write_text(project + lines)
        return Distribution(tmp_path)

    return make


def test_the_page_of_packages_is_up_to_date() -> None:
    assert write_packages(check=True) == 0


def test_every_purpose_has_a_plugin_and_the_core_stands_first() -> None:
    core, *plugins = distributions()
    tables = package_tables(core, reversed(plugins))
    assert re.findall("^## (.*)$", tables, re.MULTILINE) == ["The core", *PURPOSES]
    assert re.findall(r"^\| \[?`(.*?)`", tables, re.MULTILINE)[0] == core.name


def test_a_plugin_is_listed_under_its_purpose(plugin) -> None:
    new = plugin('[tool.forge]\npurpose = "Loggers"\n[project.entry-points."forge.logger"]\nnew = "new:New"\n')
    assert purpose_problems([new]) == []
    _, listed = package_tables(distributions()[0], [new]).split("## Loggers")
    assert "| [`forge-plugin-new`](plugins/forge-plugin-new.md) | New for Forge | logger `new` |" in listed


@pytest.mark.parametrize(
    ("lines", "fact"),
    [("", "missing"), ("[tool.other]\n", "missing"), ('[tool.forge]\npurpose = "Logers"\n', "'Logers'")],
)
def test_a_plugin_without_a_purpose_or_with_an_unknown_one_is_named_with_the_allowed_ones(plugin, lines, fact) -> None:
    new = plugin(lines)
    [problem] = purpose_problems([new])
    assert fact in problem
    path, _, message = problem.partition(": ")
    assert (ROOT / path).resolve() == (new.folder / "pyproject.toml").resolve()
    assert all(f'"{purpose}"' in message for purpose in PURPOSES)
