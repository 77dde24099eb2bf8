"""Which thorough tests run: those of folders in which something that they watch has changed since they passed.

python tests/watched.py    # in which folders has something changed?

Thorough are the checks of `forge_testing` that a component inherits, layouts and resumption among them; all tests of
the files in `thorough.txt`, each of which takes two seconds of CPU time or more; and tests with the mark. Each belongs
to a folder: a distribution (`plugins/NAME`), or a folder of `tests`. A distribution depends on its own files, and on
`EVERYWHERE` and what it and its tests require of this repository, without the tests of these; a folder of `tests` on
all distributions. `watched.sha256`, which is committed, has the versions of Python and torch, and for each folder a
digest of the files that it depends on (of Python without comments and docstrings) when its tests last passed. `make
test` skips the thorough tests of a folder whose digest has not changed, and so does CI. When all tests have passed, it
updates the record.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))

from packaging.requirements import Requirement  # noqa: E402
from workspace import Distribution  # noqa: E402

RECORD = Path(__file__).with_suffix(".sha256")
FILES = frozenset(Path(__file__).with_name("thorough.txt").read_text().split())
"""Files of tests that are thorough as a whole."""
EVERYWHERE = ("forge_core", "plugins/forge-kit", "plugins/forge-testing", "plugins/forge-plugin-parallel")
"""What all of them watch."""
UNWATCHED = ("README.md", "first_party.json")
"""Names of files that no test of a folder depends on: the second is written when the core is installed."""
ALL = "FORGE_TESTS"
"""Environment variable: `all` runs them in any case."""


def digests() -> Mapping[str, str]:
    """SHA-256 of what the tests of each folder watch, by folder."""
    with _known_files():
        return {folder: _digest(folder) for folder in _folders()}


def changed(now: Mapping[str, str]) -> list[str]:
    """Returns the folders whose thorough tests run, given the digests of now."""
    versions, recorded = _recorded()
    if os.environ.get(ALL) == "all" or versions != _versions():
        return list(now)
    return [folder for folder, digest in now.items() if recorded.get(folder) != digest]


def record(now: Mapping[str, str]) -> bool:
    """Write down that everything has passed with these digests, and return whether that was news.

    With other versions of Python or torch nothing is written: the record is of those that CI has.
    """
    versions, recorded = _recorded()
    if versions not in ("", _versions()) or now == recorded:
        return False
    RECORD.write_text("".join([f"{_versions()}\n", *(f"{digest}  {folder}\n" for folder, digest in now.items())]))
    return True


def is_thorough(path: Path) -> bool:
    """Whether all tests of a file are thorough."""
    return str(path.relative_to(ROOT)) in FILES


def folder_of(path: Path) -> str:
    """Returns the folder that a file of tests belongs to, relative to the repository."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def code(content: bytes) -> str:
    """Returns what a Python file does: the same for other comments and docstrings."""
    tree = ast.parse(content)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            # Not only the first: attributes are documented as well, by a string below each
            body[:] = [each for each in body if not _is_text(each)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _recorded() -> tuple[str, Mapping[str, str]]:
    """The versions, and the digest of each folder; empty without a record."""
    versions, *lines = RECORD.read_text().splitlines() if RECORD.exists() else [""]
    return versions, {folder: digest for digest, _, folder in (line.partition("  ") for line in lines)}


def _versions() -> str:
    python = ".".join(platform.python_version_tuple()[:2])
    return f"python {python}, torch {metadata.version('torch').partition('+')[0]}"


def _folders() -> list[str]:
    folders = sorted(folder for folder in ROOT.glob("plugins/*") if (folder / "pyproject.toml").exists())
    folders += sorted(folder for folder in ROOT.glob("tests/*") if any(folder.glob("**/test_*.py")))
    return [str(folder.relative_to(ROOT)) for folder in folders]


def _digest(folder: str) -> str:
    total = hashlib.sha256()
    for each in sorted({*EVERYWHERE, *_required(folder)}):
        total.update(f"{each}\0{_content(each, tests=each == folder)}\n".encode())
    return total.hexdigest()


@functools.cache
def _required(folder: str) -> set[str]:
    """The folder itself, and the distributions here that it requires, through others, too."""
    if (ROOT / folder / "pyproject.toml").exists():
        left = {(folder, "test")}
    else:
        left = {(f"plugins/{path.parent.name}", "") for path in ROOT.glob("plugins/*/pyproject.toml")}
    found = {(folder, "")}
    while left:
        each = left.pop()
        found.add(each)
        left |= _requires_itself(*each) - found
    return {name for name, _ in found if (ROOT / name).is_dir()}


@functools.cache
def _requires_itself(folder: str, extra: str) -> set[tuple[str, str]]:
    """Folders of what one requires with an extra, each with an extra of its own that is required; none of others."""
    if not (ROOT / folder / "pyproject.toml").exists():
        return set()
    project = Distribution(ROOT / folder).project
    lines = [*project["dependencies"], *project.get("optional-dependencies", {}).get(extra, ())]
    named = [Requirement(line) for line in lines]
    return {(f"plugins/{each.name}", extra) for each in named for extra in ("", *each.extras)}


@functools.cache
def _content(folder: str, tests: bool) -> str:
    total = hashlib.sha256()
    for path in sorted((ROOT / folder).rglob("*")):
        if not path.is_file() or path.parent.name == "__pycache__" or path.name in UNWATCHED:
            continue
        if not tests and (ROOT / folder / "tests") in path.parents:
            continue
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if path.suffix == ".py":
            if digest not in _known:
                _known[digest] = hashlib.sha256(code(content).encode()).hexdigest()
            digest = _known[digest]
        total.update(f"{path.relative_to(ROOT)}\0{digest}\n".encode())
    return total.hexdigest()


_known: dict[str, str] = {}
"""Digest of the code of a Python file, by that of its content."""


@contextlib.contextmanager
def _known_files() -> Iterator[None]:
    """Keep `_known` from run to run, next to what pytest keeps: parsing a thousand files takes eight seconds."""
    kept = ROOT / ".pytest_cache" / "watched.json"
    with contextlib.suppress(OSError, ValueError):
        _known.update(json.loads(kept.read_text()))
    before = len(_known)
    yield
    if len(_known) > before:
        with contextlib.suppress(OSError):
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(json.dumps(_known))


if __name__ == "__main__":
    print("\n".join(changed(digests())) or "nothing has changed since all of them passed")
