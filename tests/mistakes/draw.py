"""Draws careless changes of the sources at random, and records which of them the tests notice.

    python tests/mistakes/draw.py --reached FOLDER --jobs 2   # continues the table with the changes of --seed
    python tests/mistakes/draw.py --list                      # the changes only
    python tests/mistakes/draw.py --score                     # the score of each seed in the table

Each change is made in a copy of the repository, and the tests run that enter the changed function, by a record of the
whole suite that `reached.py` makes. A test that fails counts only if it passes without the change. The table,
`drawn.toml`, is written after each change; a person adds `note` to a change that survived: `equivalent: ...` if it
changes nothing, `test there: ...` if a test that was left out for lack of time notices it, `test added: ...` otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import reached
import tomli_w
from operators import OPERATORS, Change, changes
from run import FAILED, PASSED, ROOT, Copy, sources

TABLE = Path(__file__).with_name("drawn.toml")
BUDGETS_S = (90.0, 60.0)
"""Seconds, as recorded, of tests of the change's own distribution, and of tests of others."""
OVERHEAD_S = 0.02
"""Seconds of pytest itself for each test."""
READ_CLASSES = "tests/config/test_defaults.py"
"""Tests that compare values in class bodies, and enter no function of these classes."""
LIMIT_S = 900.0
"""Seconds for each list of tests. A change that makes ranks wait for each other takes all of them."""
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


class Reached:
    """Which tests enter which functions, as `reached.py` recorded it."""

    def __init__(self, root: Path, folder: Path) -> None:
        """
        Raises:
            FileNotFoundError: Nothing was recorded in this folder.
        """
        self._root = root
        self._tests = reached.read(folder)
        self._seconds = reached.read_seconds(folder)
        if not self._tests:
            raise FileNotFoundError(f"{folder} has no record of reached.py")

    def keep(self, tests: set[str]) -> None:
        """Forget all other tests: those that have a new name, or are gone, since they were recorded."""
        self._tests = {function: entering & tests for function, entering in self._tests.items()}
        self._seconds = {name: seconds for name, seconds in self._seconds.items() if name in tests}

    def stages(self, change: Change) -> list[list[str]]:
        """Returns the tests to run one list after the other: those of its own distribution, and those of others.

        First those that enter the changed function, then the others in their files, which may observe what these have
        made: the quickest first, for as long as `BUDGETS_S`. A change outside of functions acts through its whole file,
        and on `READ_CLASSES`.
        """
        own = reached.key(change.file, ".".join(change.inside))
        if own in self._tests:
            entering = set(self._tests[own])
        else:
            keys = reached.keys_of(self._root / change.file, change.file)
            entering = {name for name in self._seconds if name.startswith(READ_CLASSES)}
            entering = entering.union(*(self._tests.get(each, ()) for each in keys))
        files = {name.partition("::")[0] for name in entering}
        beside = {name for name in self._seconds if name.partition("::")[0] in files} - entering
        home = _home(change)
        stages = []
        for is_own, budget_s in zip((True, False), BUDGETS_S, strict=True):
            ordered = [
                name
                for group in (entering, beside)
                for name in sorted(group, key=self._turn)
                if name.startswith(home) == is_own
            ]
            total = itertools.accumulate(self._seconds.get(name, 0.0) + OVERHEAD_S for name in ordered)
            stages.append([name for name, until in zip(ordered, total, strict=True) if until <= budget_s])
        return [stage for stage in stages if stage]

    def _turn(self, name: str) -> tuple[bool, float, str]:
        return not name.startswith(READ_CLASSES), self._seconds.get(name, 0.0), name


def _home(change: Change) -> str:
    """Where the tests of its distribution, or of its part of the core, are."""
    parts = Path(change.file).parts
    return f"plugins/{parts[1]}/tests/" if parts[0] == "plugins" else f"tests/{parts[1]}/"


# --- one change ----------------------------------------------------------------------------------------------------


def collect(copy: Copy) -> set[str]:
    """Returns the names of all tests."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=--import-mode=importlib"]
    done = subprocess.run(command, cwd=copy.folder, env=copy.environment, capture_output=True, text=True, check=True)
    return {line for line in done.stdout.splitlines() if "::" in line}


def run_tests(copy: Copy, tests: Sequence[str], left_out: Sequence[str] = ()) -> tuple[int, str]:
    """Run tests in the copy.

    Returns:
        The exit code of pytest, -1 if it took too long; and the first test that failed.
    """
    options = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
    arguments = copy.folder.with_name(f"{copy.folder.name}.tests")
    arguments.write_text("\n".join(name for name in tests if name not in left_out))
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, f"@{arguments}"],
        cwd=copy.folder, env=copy.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # ranks that wait for each other, too
        process.wait()
        return -1, ""
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    return process.returncode, found[1] if found else ""


def try_change(change: Change, copy: Copy, stages: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Returns the entry of the table: `killed`, `survived` or `hangs` (a stage of the tests took too long)."""
    path = copy.folder / change.file
    text = path.read_text()
    unsure: list[str] = []
    result, killer = "survived", ""
    began = time.monotonic()
    left = list(stages)
    while left and result == "survived":
        path.write_text(change.apply(text))
        try:
            code, failed = run_tests(copy, left[0], unsure)
        finally:
            path.write_text(text)
        if code == -1:
            result = "hangs" if run_tests(copy, left[0], unsure)[0] == PASSED else result
        elif code > FAILED or (code == FAILED and run_tests(copy, [failed])[0] == PASSED):
            result, killer = "killed", failed or "collection"
        elif code == FAILED and failed not in unsure:
            unsure.append(failed)  # fails without the change, too: once more without it
            continue
        left.pop(0)
    entry = {"file": change.file, "line": change.line, "operator": change.operator}
    entry |= {"old": change.old[:KEPT], "new": change.new[:KEPT], "result": result, "killer": killer}
    entry |= {"tests": sum(map(len, stages)), "seconds": round(time.monotonic() - began)}
    return entry | ({"unsure": unsure} if unsure else {})


# --- the table -----------------------------------------------------------------------------------------------------


def read_drawn(path: Path = TABLE) -> list[dict[str, Any]]:
    """Returns the entries of the table."""
    return tomllib.loads(path.read_text())["change"] if path.exists() else []


def scores(entries: Sequence[dict[str, Any]]) -> str:
    """Returns a line for each seed: of its changes that change something, how many tests noticed."""
    seeds = dict.fromkeys(entry["seed"] for entry in entries)
    return "\n".join(f"seed {seed}: {_score([e for e in entries if e['seed'] == seed])}" for seed in seeds)


def _score(entries: Sequence[dict[str, Any]]) -> str:
    counted = [entry for entry in entries if not entry.get("note", "").startswith("equivalent")]
    notes = [entry.get("note", "") if entry["result"] == "survived" else "test there" for entry in counted]
    killed, later = (sum(note.startswith(begin) for note in notes) for begin in ("test there", "test added"))
    share = f"{killed} of {len(counted)} ({killed / max(1, len(counted)):.0%})"
    nothing = len(entries) - len(counted)
    return f"{share} were noticed when drawn, {later} more by tests added since; {nothing} change nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=32)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--reached", type=Path, help="folder of a record that reached.py has made")
    parser.add_argument("--jobs", type=int, default=1, help="changes that are tried at the same time")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no change after these")
    parser.add_argument("--list", action="store_true", help="print the changes only")
    parser.add_argument("--score", action="store_true", help="print the scores of the table only")
    options = parser.parse_args()
    entries = read_drawn()
    if options.score:
        print(scores(entries))
        return
    drawn = draw(options.seed, options.count, ROOT)
    if options.list:
        for change in drawn:
            print(f"{change.file}:{change.line} {change.operator}: {change.old[:60]!r} -> {change.new[:60]!r}")
        return
    if options.reached is None:
        parser.error("which tests enter a function? --reached FOLDER, see reached.py")
    record = Reached(ROOT, options.reached)
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        copies = queue.SimpleQueue[Copy]()
        for number in range(options.jobs):
            (own := Path(folder) / str(number)).mkdir()
            copies.put(copy := Copy(ROOT, own))
        record.keep(collect(copy))

        def tried(change: Change) -> dict[str, Any] | None:
            if time.monotonic() > until:
                return None
            copy = copies.get()
            try:
                return try_change(change, copy, record.stages(change))
            finally:
                copies.put(copy)

        # In the order of the draw, so that the table can be continued
        begun = sum(entry["seed"] == options.seed for entry in entries)
        for entry in itertools.takewhile(bool, pool.map(tried, drawn[begun:])):
            entries.append({"seed": options.seed, **entry})
            TABLE.write_text(tomli_w.dumps({"change": entries}))
            place = f"{entry['file']}:{entry['line']} {entry['operator']}"
            print(f"{len(entries)} {place}: {entry['result']} {entry['killer']} ({entry['seconds']} s)", flush=True)
    print(scores(entries))


if __name__ == "__main__":
    main()
