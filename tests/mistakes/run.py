"""Makes deliberate mistakes in a copy of the repository, one at a time, and sees whether the tests notice.

    python tests/mistakes/run.py                  # every mistake of table.toml
    python tests/mistakes/run.py clipping resume  # those whose names contain one of these
    python tests/mistakes/run.py --list           # names and tests

The working tree is never changed. A mistake is found if its tests, which pass without it, fail.
The exit code is 1 if a mistake was not found, or has no test.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("table.toml")
HANG_S = 900.0
"""Seconds after which tests are ended. A mistake that makes ranks wait for each other is found by that."""
FAILED, PASSED = 1, 0
"""Exit codes of pytest; with any other, it could not run the tests."""


@frozen
class Mistake:
    """One replacement in the sources, and the tests that must fail with it."""

    name: str
    old: str
    new: str
    tests: Sequence[str]


class AnchorError(Exception):
    """The text of a mistake does not stand in the sources exactly once."""


class Copy:
    """A copy of the repository, whose packages come before the installed ones."""

    def __init__(self, root: Path, folder: Path) -> None:
        """
        Args:
            root: Repository to copy: what git tracks, and new files that it does not ignore.
            folder: Empty folder for the copy.
        """
        self.folder = folder
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)
        paths = [str(folder), *map(str, sorted((folder / "plugins").glob("*")))]
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        self.environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        self._check_imports()

    def run(self, tests: Iterable[str]) -> tuple[int, str]:
        """Run tests here.

        Returns:
            The exit code of pytest, `FAILED` if it had to be ended, and its last lines.
        """
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=HANG_S
            )
        except subprocess.TimeoutExpired:
            return FAILED, f"no end within {HANG_S:.0f} s"
        return done.returncode, "\n".join(done.stdout.strip().splitlines()[-12:])

    def _check_imports(self) -> None:
        code = "import forge_core, forge_testing; print(forge_core.__file__, forge_testing.__file__)"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd="/", env=self.environment, capture_output=True, text=True, check=True)
        elsewhere = [path for path in done.stdout.split() if not Path(path).is_relative_to(self.folder)]
        if elsewhere:
            raise RuntimeError(f"packages are imported from {elsewhere}, not from the copy")


def read_table(path: Path = TABLE) -> list[Mistake]:
    """The mistakes of a table, in its order."""
    return [Mistake(**entry) for entry in tomllib.loads(path.read_text())["mistake"]]


def sources(root: Path) -> list[Path]:
    """The product's modules: those of the core, and of every plugin without its tests and templates."""
    folders = [root / "forge_core", *(path.parent for path in sorted((root / "plugins").glob("*/*/__init__.py")))]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [path for path in paths if not {"tests", "templates"} & set(path.relative_to(root).parts)]


def locate(mistake: Mistake, root: Path) -> Path:
    """The file that a mistake is made in.

    Raises:
        AnchorError: Its text stands nowhere, or more than once.
    """
    counts = {path: path.read_text().count(mistake.old) for path in sources(root)}
    total = sum(counts.values())
    if total != 1:
        places = ", ".join(str(path.relative_to(root)) for path, count in counts.items() if count) or "no file"
        raise AnchorError(f"{mistake.name!r}: its text stands {total} times ({places}), not once:\n{mistake.old}")
    return next(path for path, count in counts.items() if count)


def try_mistake(mistake: Mistake, copy: Copy) -> tuple[bool, str]:
    """Make a mistake in a copy, run its tests, and undo it.

    Returns:
        Whether the tests found it, and the last lines of pytest.

    Raises:
        RuntimeError: The tests could not be run.
    """
    path = locate(mistake, copy.folder)
    text = path.read_text()
    path.write_text(text.replace(mistake.old, mistake.new))
    try:
        code, output = copy.run(mistake.tests)
    finally:
        path.write_text(text)
    if code not in (FAILED, PASSED):
        raise RuntimeError(f"the tests of {mistake.name!r} could not be run:\n{output}")
    return code == FAILED, output


def verdict(mistake: Mistake, copy: Copy) -> str:
    """`found`, or why not."""
    if not mistake.tests:
        return "NO TEST"
    try:
        found, output = try_mistake(mistake, copy)
    except (AnchorError, RuntimeError) as error:
        return f"ERROR {error}"
    return "found" if found else f"NOT FOUND\n{output}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names; without any, all mistakes")
    parser.add_argument("--list", action="store_true", help="print names and tests only")
    parser.add_argument("--root", type=Path, default=ROOT, help="repository to copy (default: this one)")
    parser.add_argument("--trust-tests", action="store_true", help="do not run the tests without mistakes first")
    options = parser.parse_args()
    chosen = [m for m in read_table() if not options.names or any(part in m.name for part in options.names)]
    if options.list:
        for mistake in chosen:
            print(f"{mistake.name}: {', '.join(mistake.tests) or 'no test'}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(options.root, Path(folder))
        tests = sorted({test for mistake in chosen for test in mistake.tests})
        if tests and not options.trust_tests and (result := copy.run(tests))[0] != PASSED:
            print(f"the tests do not pass without any mistake:\n{result[1]}")
            return 1
        verdicts = []
        for mistake in chosen:
            began = time.monotonic()
            verdicts.append(verdict(mistake, copy))
            print(f"{mistake.name}: {verdicts[-1]}  ({time.monotonic() - began:.0f} s)", flush=True)
    found = verdicts.count("found")
    print(f"found {found} of {len(verdicts)} ({found / max(1, len(verdicts)):.0%})")
    return 0 if found == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
