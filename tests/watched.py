"""Tests marked `thorough` try the tests themselves. They run if what they watch has changed, and in `make test-all`.

python tests/watched.py            # has it changed since all of them passed?
python tests/watched.py --record   # write down that they have passed with what is here: the end of `make test-all`

They are the wrong components that conformance suites must refuse, the reductions that are taken out of each layout of
the parity table, and its rows whose pairs other rows have. `watched.sha256`, which is committed, is the digest of the
code (comments left out) of all files in `WATCHED`, and of the versions of Python and torch, with which all of them
passed last. Whoever changes one of these without `make test-all` runs them in `make test` too, and so does CI.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".sha256")
WATCHED = (
    "plugins/forge-testing",
    "plugins/forge-plugin-parallel/forge_plugin_parallel",
    "forge_core/contracts",
    "forge_core/parallel",
    "tests/parity",
)
ALL = "FORGE_TESTS"
"""Environment variable: `all` runs them in any case."""


@functools.cache
def digest() -> str:
    """SHA-256 of the watched Python files, by name and code, and of the versions of Python and torch."""
    python = ".".join(platform.python_version_tuple()[:2])
    total = hashlib.sha256(f"python {python}, torch {metadata.version('torch')}\n".encode())
    for path in sorted(path for folder in WATCHED for path in (ROOT / folder).rglob("*.py")):
        code = ast.unparse(ast.parse(path.read_bytes()))  # the same for other comments
        total.update(f"{path.relative_to(ROOT)}\0{hashlib.sha256(code.encode()).hexdigest()}\n".encode())
    return total.hexdigest()


def reason_to_run() -> str:
    """Why the thorough tests run; empty if they do not."""
    if os.environ.get(ALL) == "all":
        return f"{ALL}=all"
    recorded = RECORD.read_text().strip() if RECORD.exists() else ""
    return "" if recorded == digest() else f"{', '.join(WATCHED)} or the version of Python or torch has changed"


def main() -> None:
    if sys.argv[1:] == ["--record"]:
        RECORD.write_text(f"{digest()}\n")
    print(f"thorough tests run: {reason}" if (reason := reason_to_run()) else "unchanged since all of them passed")


if __name__ == "__main__":
    main()
