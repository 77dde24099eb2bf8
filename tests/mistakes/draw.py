"""Draws careless changes of the sources at random, and records which of them the tests notice.

    python tests/mistakes/draw.py --seed 32 --count 100          # continues the table of that seed
    python tests/mistakes/draw.py --seed 32 --count 100 --list   # the changes only
    python tests/mistakes/draw.py --score                        # the score of the table

Each change is made in a copy of the repository. The test files that are nearest to it run first, then wider ones. A
test that fails counts only if it passes without the change. The table, `drawn.toml`, is written after each change; a
person adds `note` to a change that survived: `equivalent: ...` if it changes nothing, `test added: ...` otherwise.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from operators import OPERATORS, Change, changes
from run import FAILED, PASSED, ROOT, Copy, sources

TABLE = Path(__file__).with_name("drawn.toml")
NEAREST, WIDER = 3, 6
"""Test files that run first, and after those."""
LIMITS_S = (300.0, 600.0)
"""Seconds for each of the two. A change that makes ranks wait for each other takes all of them, which is not a kill."""
KEPT = 160
"""Characters of a replaced text that the table keeps."""


def draw(seed: int, count: int, root: Path) -> list[Change]:
    """Returns `count` changes: each of an operator drawn first, so that rare ones are tried as often as common ones."""
    generator = random.Random(seed)
    by_operator: dict[str, list[Change]] = {name: [] for name in OPERATORS}
    for path in sources(root):
        if "forge-testing" not in path.parts:  # the tests' own tools
            for change in changes(path, root):
                by_operator[change.operator].append(change)
    drawn: list[Change] = []
    while len(drawn) < count:
        change = generator.choice(by_operator[generator.choice([*OPERATORS])])
        if change not in drawn and change.compiles((root / change.file).read_text()):
            drawn.append(change)
    return drawn


# --- which tests ---------------------------------------------------------------------------------------------------


def nearest(change: Change, root: Path) -> list[str]:
    """Returns the test files by how much of the change's surroundings they name, the nearest first."""
    path = root / change.file
    module = ".".join(
        path.relative_to(root / "plugins" / path.relative_to(root).parts[1] if _plugin(change) else root)
        .with_suffix("")
        .parts
    )
    public = set(re.findall(r"^(?:def|class) ([A-Za-z]\w+)", path.read_text(), re.MULTILINE))
    scores = {}
    for test in _test_files(root):
        text = test.read_text()
        name = str(test.relative_to(root))
        scores[name] = (
            5 * bool(re.search(rf"\b{re.escape(module)}\b", text))
            + 3 * sum(bool(re.search(rf"\b{re.escape(part)}\b", text)) for part in change.inside)
            + min(4, sum(bool(re.search(rf"\b{part}\b", text)) for part in public))
            + 4 * (name.startswith(_home(change)))
        )
    return sorted((name for name, score in scores.items() if score > 3), key=lambda name: (-scores[name], name))


def _plugin(change: Change) -> str:
    parts = Path(change.file).parts
    return parts[1] if parts[0] == "plugins" else ""


def _home(change: Change) -> str:
    """Where the tests of its distribution, or of its part of the core, are."""
    plugin = _plugin(change)
    return f"plugins/{plugin}/tests/" if plugin else f"tests/{Path(change.file).parts[1]}/"


def _test_files(root: Path) -> Iterator[Path]:
    for folder in (root / "tests", *sorted((root / "plugins").glob("*/tests"))):
        yield from (path for path in sorted(folder.rglob("test_*.py")) if "gpu" not in path.parts)


# --- one change ----------------------------------------------------------------------------------------------------


def run_tests(copy: Copy, tests: Sequence[str], limit_s: float, left_out: Sequence[str] = ()) -> tuple[int, str]:
    """Run tests in the copy.

    Returns:
        The exit code of pytest, -1 if it took too long; and the first test that failed.
    """
    options = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", *(f"--deselect={name}" for name in left_out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=copy.folder, env=copy.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # ranks that wait for each other, too
        process.wait()
        return -1, ""
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    return process.returncode, found[1] if found else ""


def try_change(change: Change, copy: Copy) -> dict[str, Any]:
    """Returns the entry of the table: `killed`, `survived` or `hangs` (a stage of the tests took too long)."""
    path = copy.folder / change.file
    text = path.read_text()
    files, unsure, result, killer = nearest(change, copy.folder), [], "survived", ""
    began = time.monotonic()
    stages = [(files[:NEAREST], LIMITS_S[0]), (files[NEAREST : NEAREST + WIDER], LIMITS_S[1])]
    while stages and result != "killed":
        tests, limit_s = stages[0]
        path.write_text(change.apply(text))
        try:
            code, failed = run_tests(copy, tests, limit_s, unsure) if tests else (PASSED, "")
        finally:
            path.write_text(text)
        if code == -1:
            result = "hangs" if run_tests(copy, tests, limit_s, unsure)[0] == PASSED else result
        if code > FAILED or (code == FAILED and run_tests(copy, [failed], limit_s)[0] == PASSED):
            result, killer = "killed", failed or "collection"
        elif code == FAILED and failed not in unsure:
            unsure.append(failed)  # fails without the change, too: once more without it
            continue
        stages.pop(0)
    entry = {"file": change.file, "line": change.line, "operator": change.operator}
    entry |= {"old": change.old[:KEPT], "new": change.new[:KEPT], "result": result, "killer": killer}
    return entry | {"seconds": round(time.monotonic() - began)} | ({"unsure": unsure} if unsure else {})


# --- the table -----------------------------------------------------------------------------------------------------


def read_drawn(path: Path = TABLE) -> list[dict[str, Any]]:
    """Returns the entries of the table."""
    return tomllib.loads(path.read_text())["change"] if path.exists() else []


def score(entries: Sequence[dict[str, Any]]) -> str:
    """Returns killed and tried changes, without those that change nothing."""
    counted = [entry for entry in entries if not entry.get("note", "").startswith("equivalent")]
    killed = sum(entry["result"] != "survived" or entry.get("note", "").startswith("test added") for entry in counted)
    equivalent = len(entries) - len(counted)
    return f"killed {killed} of {len(counted)} ({killed / max(1, len(counted)):.0%}), and {equivalent} change nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=32)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no change after these")
    parser.add_argument("--list", action="store_true", help="print the changes only")
    parser.add_argument("--score", action="store_true", help="print the score of the table only")
    options = parser.parse_args()
    entries = read_drawn()
    if options.score:
        print(score(entries))
        return
    drawn = draw(options.seed, options.count, ROOT)
    if options.list:
        for change in drawn:
            print(f"{change.file}:{change.line} {change.operator}: {change.old[:60]!r} -> {change.new[:60]!r}")
        return
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(ROOT, Path(folder))
        for change in drawn[len(entries) :]:
            if time.monotonic() > until:
                break
            entries.append(try_change(change, copy))
            TABLE.write_text(tomli_w.dumps({"change": entries}))
            last = entries[-1]
            place = f"{change.file}:{change.line} {change.operator}"
            print(f"{len(entries)} {place}: {last['result']} {last['killer']} ({last['seconds']} s)", flush=True)
    print(score(entries))


if __name__ == "__main__":
    main()
