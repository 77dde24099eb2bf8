"""`AGENTS.md`: short, and every command in it runs.

Commands that take a moment are run as they stand. Of others, the part that can be wrong without anybody noticing is
tried: `make` prints what it would do, pytest collects, and a script that takes minutes is compiled.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fences import ROOT, fences

AGENTS = ROOT / "AGENTS.md"
LINK = re.compile(r"`((?:[\w.-]+/)[\w./*-]*)`")
IN_SHORT = {
    "make": lambda words: ["make", "--dry-run", *words[1:]],
    "python -m pytest -q tests": lambda words: [
        "true"
    ],  # large: collecting alone takes half a minute; a test has its path
    "python -m pytest": lambda words: [sys.executable, *words[1:], "--collect-only", "-p", "no:cacheprovider"],
    "python tools/workspace.py types": lambda words: [sys.executable, words[1], "--help"],
    "python tools/workspace.py contracts": lambda words: [sys.executable, words[1], "--help"],
    "python tests/measure.py": lambda words: [sys.executable, "-m", "py_compile", words[1]],  # a test has its figures
    "python tests/plain_words.py": lambda words: [sys.executable, "-m", "py_compile", words[1]],  # likewise
    "python tests/docs": lambda words: [sys.executable, "-m", "py_compile", *words[1:2]],  # they write into pages
    "pip install": lambda words: [sys.executable, "-m", *words, "--dry-run", "--quiet"],
    "source": lambda words: ["true"],  # the environment that `make venv` makes, in which this runs already
}
"""What is run instead, by the beginning of a command."""


def lines() -> list[str]:
    return [line for fence in fences(AGENTS) if fence.language == "bash" for line in fence.text.splitlines() if line]


def test_it_is_short_and_the_other_name_is_a_link() -> None:
    assert len(AGENTS.read_text().splitlines()) <= 120
    other = ROOT / "CLAUDE.md"
    assert other.is_symlink()
    assert other.resolve() == AGENTS


@pytest.mark.parametrize("line", lines())
def test_each_command_runs(line: str) -> None:
    words = shlex.split(line)
    short = next((make(words) for start, make in IN_SHORT.items() if line.startswith(start)), None)
    command = short or [sys.executable if words[0] == "python" else words[0], *words[1:]]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def test_each_path_that_it_names_exists() -> None:
    named = [path for path in LINK.findall(AGENTS.read_text()) if "KIND" not in path]
    assert len(named) > 10
    assert [path for path in named if not list(ROOT.glob(path.rstrip("/")))] == []


def test_files_that_its_commands_name_exist() -> None:
    named = {word for line in lines() for word in shlex.split(line) if "/" in word and not word.startswith(".venv")}
    assert [path for path in named if not (ROOT / path).exists()] == []
