from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge_core.cli import main

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "one",
    "owl",
    "naps",
    "at",
    "home",
]


@pytest.fixture
def sentences() -> Callable[[int, int], str]:
    """Make a text: (its number, words) -> text, another one for each number."""

    def make(number: int, count: int) -> str:
        return " ".join(WORDS[(number * 7 + k * k + k // 5) % len(WORDS)] for k in range(count)) + "\n"

    return make


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory and cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def books(here: Path, sentences: Callable[[int, int], str]) -> Path:
    """A folder of 40 texts."""
    folder = here / "books"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(sentences(number, 300))
    return folder


@pytest.fixture
def init(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `forge-run init …` in this process: exit code, standard output, standard error."""

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(["init", *argv])
        except SystemExit as end:
            code = int(end.code or 0)
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def chosen(init: Callable[..., tuple[int, str, str]]) -> Callable[..., Any]:
    """Run `forge-run init … --json` for a machine of 50 GFLOP/s, and read what was chosen."""

    def run(*argv: str) -> Any:
        code, out, err = init(*argv, "--tflops=0.05", "--json")
        assert code == 0, err
        return json.loads(out)

    return run
