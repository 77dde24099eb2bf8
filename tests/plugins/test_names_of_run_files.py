"""The files of a run have one owner: nobody else spells their names, or writes a file aside and renames it by hand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = {"job.toml", "provenance.json", "plan.txt", "metrics.jsonl", "end.json", ".lock", "checkpoints"}
OWNERS = {
    "forge_core/checkpoint/run_folder.py",
    "forge_core/checkpoint/storage.py",
    "forge_core/job.py",
    "forge_core/cli/__init__.py",  # answers before it imports anything
}
RENAMES = {
    "forge_core/files.py": "write_atomically",
    "forge_core/checkpoint/storage.py": "checkpoints are folders",
    "plugins/forge-plugin-plan/forge_plugin_plan/doctor/file_system.py": "tries renaming itself",
    "plugins/forge-plugin-vision/forge_plugin_vision/features/files.py": "without waiting for the disk",
    "plugins/forge-plugin-checkpoints/forge_plugin_checkpoints/objects/bucket.py": "a shard, while it arrives",
}
"""Modules that call `os.replace`, with the reason."""


def modules() -> list[Path]:
    """All modules of the core and of plugins, without templates."""
    paths = [*(ROOT / "forge_core").rglob("*.py"), *(ROOT / "plugins").glob("*/forge_*/**/*.py")]
    return sorted(path for path in paths if "templates" not in path.parts)


def spelled(tree: ast.Module) -> Iterator[str]:
    """Names of files of a run that take part in making a path."""
    for node in ast.walk(tree):
        parts = [node.right] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) else []
        if isinstance(node, ast.Assign):
            parts = [node.value, *getattr(node.value, "elts", [])]
        for part in parts:
            value = part.value if isinstance(part, ast.Constant) else None
            if value in NAMES and (value != "checkpoints" or isinstance(node, ast.BinOp)):  # it is a word, too
                yield str(value)


def calls_replace(tree: ast.Module) -> bool:
    functions = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    attributes = [each for each in functions if isinstance(each, ast.Attribute)]
    return any(ast.unparse(each) in ("os.replace", "os.rename") for each in attributes)


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Modules that have one of the names or of the calls in their text: parsing all others takes seconds."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in modules()}
    words = re.compile("|".join(map(re.escape, (*NAMES, "os.replace", "os.rename"))))
    return {name: ast.parse(text) for name, text in texts.items() if words.search(text)}


def test_names_of_the_files_of_a_run_stand_with_their_owners_only(trees):
    assert {name: [*spelled(tree)] for name, tree in trees.items() if name not in OWNERS and [*spelled(tree)]} == {}


def test_files_are_replaced_by_one_function(trees):
    assert {name for name, tree in trees.items() if calls_replace(tree)} == set(RENAMES)


def test_what_is_looked_for_would_be_found():
    assert {*spelled(ast.parse('(folder / "job.toml").read_text(); NAME = "end.json"'))} == {"job.toml", "end.json"}
    assert calls_replace(ast.parse("os.replace(one, other)"))
