"""Lists the errors that no test provokes: statements that raise or yield a problem, and that are never reached.

    LINES=folder PYTHONPATH=tests/mistakes/recording python -m pytest ...   # Python 3.12 and later
    python tests/mistakes/unprovoked.py folder

Each process of the run, those that tests start included, appends the lines that it reaches to a file of its own.
"""

from __future__ import annotations

import ast
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

from reached import ROOT, Recorder

FOLDER = "LINES"


class LineRecorder(Recorder):
    """Writes the lines that processes reach, each once per process."""

    event = "LINE"

    def name_of(self, code: CodeType, file: str) -> str:
        return file

    def text_of(self, name: str, place: int) -> str:
        return f"{name}:{place}"


def read(folder: Path) -> dict[str, set[int]]:
    """Returns the lines of each file that were reached."""
    lines: dict[str, set[int]] = defaultdict(set)
    for path in folder.glob("*.txt"):
        for text in path.read_text().splitlines():
            file, _, line = text.rpartition(":")
            if line.isdecimal():  # not `T` and the name of a test
                lines[file].add(int(line))
    return lines


def errors(source: str) -> Iterator[ast.stmt]:
    """Yields the statements of a file that raise, or yield a problem."""
    for node in ast.walk(ast.parse(source)):
        yields = isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield) and "Problem(" in ast.unparse(node)
        if isinstance(node, ast.Raise) or yields:
            yield node


def main() -> None:
    from run import sources  # not where lines are recorded: it imports other packages

    reached = read(Path(sys.argv[1]))
    for path in sources(ROOT):
        file = str(path.relative_to(ROOT))
        for error in errors(path.read_text()):
            if not reached[file] & {*range(error.lineno, (error.end_lineno or error.lineno) + 1)}:
                print(f"{file}:{error.lineno} {ast.unparse(error)[:120]}")


if os.environ.get(FOLDER):
    Path(os.environ[FOLDER]).mkdir(parents=True, exist_ok=True)
    LineRecorder(ROOT, Path(os.environ[FOLDER])).install()
elif __name__ == "__main__":
    main()
