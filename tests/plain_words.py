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


def strings(path: Path) -> Iterator[Prose]:
    """Docstrings, documentation of fields, comments and messages (strings of several words) of a Python file."""
    alone = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Prose("docstrings" if id(node) in alone else "messages", path, node.lineno, node.value)
    source = path.read_text()
    for match in COMMENT.finditer(source):
        yield Prose("docstrings", path, source.count("\n", 0, match.start(1)) + 1, match[1])


def files() -> Iterator[Path]:
    """What users and authors read: pages, READMEs, and the code of the core and of all plugins."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        if path.name not in NOT_READ and not {"tests", "templates", "node_modules"} & set(path.parts):
            yield path
    yield ROOT / "README.md"
    yield from sorted((ROOT / "plugins").glob("*/README.md"))
    for folder in (ROOT / "forge_core", *sorted((ROOT / "plugins").glob("*/forge_*"))):
        yield from (path for path in sorted(folder.rglob("*.py")) if "templates" not in path.parts)


def prose_of(path: Path) -> Iterator[Prose]:
    """The text of a page, or the strings of a Python file."""
    if path.suffix == ".py":
        yield from strings(path)
    else:
        yield Prose("docs", path, 1, path.read_text())


def per_10_000() -> dict[str, float]:
    """Such words per 10,000 words, by kind of text."""
    words, found = (
        dict.fromkeys(("docs", "docstrings", "messages"), 0),
        dict.fromkeys(("docs", "docstrings", "messages"), 0),
    )
    for path in files():
        for prose in prose_of(path):
            plain = prose.plain
            words[prose.kind] += len(WORD.findall(plain))
            found[prose.kind] += len(WORDS.findall(plain))
    return {kind: round(10_000 * found[kind] / words[kind], 1) for kind in words}


def main() -> None:
    chosen = [Path(argument).resolve() for argument in sys.argv[1:]]
    if missing := [path for path in chosen if not path.exists()]:
        sys.exit(f"{missing[0]}: no such file or folder")
    # A file that is named is read wherever it lies; the others are not, as to parse all of them takes seconds
    named = [path for path in chosen if path.is_file()]
    below = (path for path in files() if not chosen or any(each in path.parents for each in chosen))
    count = 0
    for path in (*named, *below):
        for found in (found for prose in prose_of(path) for found in prose.found()):
            count += 1
            print(f"{found.path.relative_to(ROOT)}:{found.line}: {found.word}: {found.text[:200]}")
    print(f"{count} in these" if chosen else f"{count}; per 10,000 words in all: {per_10_000()}")


if __name__ == "__main__":
    main()
