"""Words that are not plain technical English, by place: python tests/plain_words.py [FOLDER OR FILE …]

They mark sentences that were thought in another language: programs that say, know and ask, nouns replaced by "those of"
and "what is". `make measure` counts them per 10,000 words.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WORDS = re.compile(
    r"\b(mend(?:s|ed|ing)?|tells|says|knows|asks|those of|that of|what there is|what is|goes on|go on|anew|of its own|"
    r"of their own|besides)\b",
    re.IGNORECASE,
)
WORD = re.compile(r"\b[A-Za-z]+\b")
CODE = re.compile(r"(?m)^( *)(```|~~~).*?^\1\2|`[^`\n]*`|<!--.*?-->", re.DOTALL)
"""What is no prose: fenced blocks, names between backticks, comments."""
COMMENT = re.compile(r"(?m)(?:^|\s)# (?!type:|noqa|pragma|---)(.*)$")
"""A comment for readers; a string that has the like is rare."""
NOT_READ = ("log.md",)
"""Pages that keep what was written at the time."""


@functools.cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of that tree: walking through those of all files takes seconds each time."""
    return tuple(ast.walk(tree(path)))


class Found(NamedTuple):
    """A word and its place."""

    path: Path
    line: int
    word: str
    text: str
    """The line around it."""


class Prose(NamedTuple):
    """A piece of text."""

    kind: str
    """`docs`, `docstrings` or `messages`."""
    path: Path
    line: int
    """Of its beginning."""
    text: str

    @property
    def plain(self) -> str:
        """The text without code, with as many lines."""
        return CODE.sub(lambda match: "\n" * match[0].count("\n"), self.text)

    def found(self) -> Iterator[Found]:
        for number, line in enumerate(self.plain.split("\n")):
            for match in WORDS.finditer(line):
                yield Found(self.path, self.line + number, match[0], line.strip())


def pages(folder: Path) -> Iterator[Prose]:
    """Every page of a folder."""
    for path in sorted(folder.rglob("*.md")):
        if path.name not in NOT_READ and not {"tests", "templates", "node_modules"} & set(path.parts):
            yield Prose("docs", path, 1, path.read_text())


def strings(path: Path) -> Iterator[Prose]:
    """Docstrings, documentation of fields, comments and messages (strings of several words) of a Python file."""
    alone = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Prose("docstrings" if id(node) in alone else "messages", path, node.lineno, node.value)
    source = path.read_text()
    for match in COMMENT.finditer(source):
        yield Prose("docstrings", path, source.count("\n", 0, match.start(1)) + 1, match[1])


def all_prose() -> Iterator[Prose]:
    """What users and authors read: pages, READMEs, and the strings of the core and of all plugins."""
    yield from pages(ROOT / "docs")
    yield Prose("docs", ROOT / "README.md", 1, (ROOT / "README.md").read_text())
    for readme in sorted((ROOT / "plugins").glob("*/README.md")):
        yield Prose("docs", readme, 1, readme.read_text())
    for folder in (ROOT / "forge_core", *sorted((ROOT / "plugins").glob("*/forge_*"))):
        for path in sorted(folder.rglob("*.py")):
            if "templates" not in path.parts:
                yield from strings(path)


def per_10_000() -> dict[str, float]:
    """Such words per 10,000 words, by kind of text."""
    words, found = (
        dict.fromkeys(("docs", "docstrings", "messages"), 0),
        dict.fromkeys(("docs", "docstrings", "messages"), 0),
    )
    for prose in all_prose():
        plain = prose.plain
        words[prose.kind] += len(WORD.findall(plain))
        found[prose.kind] += len(WORDS.findall(plain))
    return {kind: round(10_000 * found[kind] / words[kind], 1) for kind in words}


def main() -> None:
    chosen = [Path(argument).resolve() for argument in sys.argv[1:]] or [ROOT]
    count = 0
    for prose in all_prose():
        if any(prose.path == path or path in prose.path.parents for path in chosen):
            for found in prose.found():
                count += 1
                print(f"{found.path.relative_to(ROOT)}:{found.line}: {found.word}: {found.text[:200]}")
    print(f"{count} in these; per 10,000 words in all: {per_10_000()}")


if __name__ == "__main__":
    main()
