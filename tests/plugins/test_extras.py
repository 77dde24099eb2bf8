"""The extra `test` of every plugin installs what its tests import."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CORE = "forge-run"
OF_ANOTHER_NAME = {"yaml": "pyyaml", "forge_core": CORE, "PIL": "pillow", "mlflow": "mlflow-skinny"}
"""Modules whose distribution is called otherwise."""


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


# By their files: a distribution that is gone may have left a folder with compiled modules
FOLDERS = [path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml")]
PROJECTS = {normalised(folder.name): project(folder) for folder in FOLDERS} | {CORE: project(ROOT)}


def names(requirements: list[str]) -> Iterator[str]:
    yield from (normalised(re.match(r"[\w.-]+", line)[0]) for line in requirements)


def installed_with(requirements: list[str]) -> set[str]:
    """The distributions, with the requirements of those of this repository."""
    found: set[str] = set()
    waiting = [*names(requirements)]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += names(PROJECTS.get(name, {}).get("dependencies", []))
    return found


def imported(folder: Path) -> set[str]:
    """The distributions whose modules the tests in a folder import, anywhere in them."""
    files = list(folder.rglob("*.py"))
    modules = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.add(str(node.module).partition(".")[0])
    modules -= sys.stdlib_module_names | {path.stem for path in files}  # tests import helpers beside them
    return {OF_ANOTHER_NAME.get(module, normalised(module)) for module in modules}


@pytest.mark.parametrize("name", sorted(PROJECTS.keys() - {CORE}))
def test_it_installs_what_the_tests_import(name: str) -> None:
    own = PROJECTS[name]
    extras = own.get("optional-dependencies", {})
    required = [name, *own["dependencies"], *(line for extra in extras.values() for line in extra)]
    missing = imported(ROOT / "plugins" / name / "tests") - installed_with(required)
    assert not missing, f"add to the extra `test` of {name}: {', '.join(sorted(missing))}"
