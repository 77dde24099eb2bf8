"""Writes pairs for supervised fine-tuning: what a function of Python's standard library does, and the function.

    python configs/sft/docstrings.py data/docstrings.jsonl

A line has a prompt, `# Task: Return the length of a path.`, line break, `# Write: length(path)`, and its completion.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "lib2to3", "__pycache__"}
LONGEST_TASK, LONGEST_CODE = 90, 500
"""In characters."""


def pairs(folder: Path) -> Iterator[dict[str, str]]:
    """Yields a pair for each short function with a docstring, in the order of the files' names."""
    for path in sorted(folder.rglob("*.py")):
        if EXCLUDED.isdisjoint(path.relative_to(folder).parts):
            tree = ast.parse(path.read_bytes())
            functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            yield from (pair for function in functions if (pair := pair_of(function)))


def pair_of(function: ast.FunctionDef) -> dict[str, str] | None:
    """Returns the pair of a function; None if it does not suit."""
    task = (ast.get_docstring(function) or "").partition("\n\n")[0].replace("\n", " ")
    heading = f"{function.name}({ast.unparse(function.args)})"
    # Without its docstring and decorators
    function.body, function.decorator_list = function.body[1:], []
    if not function.body or not 15 <= len(task) <= LONGEST_TASK:
        return None
    code = ast.unparse(function) + "\n"
    return (
        {"prompt": f"# Task: {task}\n# Write: {heading}\n", "completion": code} if len(code) <= LONGEST_CODE else None
    )


def main(out: Path) -> None:
    """Write the pairs, each once."""
    rows = {json.dumps(pair): None for pair in pairs(Path(sysconfig.get_path("stdlib")))}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(f"{row}\n" for row in rows))
    print(f"{len(rows):,} pairs in {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
