"""Reading: TOML files layered left to right, then overrides, into one tree that knows where each value came from."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from forge_core.config.lines import find_lines
from forge_core.config.tree import Node, Origin, annotate, merge
from forge_core.contracts.errors import SURE, JobError, Problem, did_you_mean

_POSITION = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
SHOWN = 60
"""Characters of a flag that error messages show."""


def read_job(paths: Sequence[str | Path], overrides: Iterable[str] = ()) -> tuple[Node, list[Problem]]:
    """Merge files and overrides into one tree.

    Returns:
        The tree, and the problems of overrides that name a key.

    Raises:
        JobError: a file is missing or is not TOML; lists every such file, and malformed overrides.
    """
    root, unreadable = Node({}, Origin("job")), []
    for layer, path in enumerate(paths):
        try:
            root = merge(root, read_file(path, layer))
        except JobError as error:
            unreadable += error.problems
    root.origin = Origin(" + ".join(map(str, paths)) or "job")
    applied = [apply_override(root, text, layer) for layer, text in enumerate(overrides, start=len(paths))]
    problems = [problem for problem in applied if problem is not None]
    if unreadable:
        raise JobError([*unreadable, *(problem for problem in problems if not problem.path)])
    return root, problems


def read_file(path: str | Path, layer: int = 0) -> Node:
    """The tree of one file.

    Raises:
        JobError: it cannot be read, or is not TOML; names line and column.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        return annotate(tomllib.loads(text), find_lines(text), Origin(str(path), 0, layer))
    except FileNotFoundError:
        others = [str(other) for other in Path(path).parent.glob("*.toml")]
        raise _fault(str(path), f"no such file{did_you_mean(str(path), others, SURE)}") from None
    except OSError as error:
        raise _fault(str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise _fault(str(path), f"not UTF-8 text: byte {byte:#04x} at offset {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise _syntax_fault(str(path), text, str(error)) from None


def _syntax_fault(source: str, text: str, message: str) -> JobError:
    position = _POSITION.search(message)
    line, column = position.groups() if position else (None, None)
    if line is None:
        line, column = text.count("\n") + 1, len(text) - text.rfind("\n")
    reason = _POSITION.sub("", message)
    return _fault(f"{source}:{line}:{column}", f"not valid TOML: {reason[:1].lower()}{reason[1:]}")


def _fault(origin: str, message: str) -> JobError:
    return JobError([Problem("", message, origin)])


# --- overrides ---------------------------------------------------------------------------------------------------


class OverrideError(Exception):
    """An override cannot be applied. `path` is the key at fault, empty if the flag itself is malformed."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


def apply_override(root: Node, text: str, layer: int) -> Problem | None:
    """Set one key of the tree in place (`--optimizer.lr=1e-3`, `--data.sources.0.weight=2`).

    Missing tables on the way are created: a misspelt one is reported later, as an unknown key.

    Returns:
        The problem, if the override cannot be applied.
    """
    text = "--" + text.removeprefix("--")
    origin = Origin(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…", 0, layer)
    try:
        path, value = parse_override(text)
        _put(root, path, annotate(value, {}, origin))
    except OverrideError as error:
        return Problem(error.path, str(error), str(origin))
    return None


def parse_override(text: str) -> tuple[list[str], Any]:
    """Key path and value of `--a.b=value`.

    Raises:
        OverrideError: the value is missing, or the key is not a TOML key.
    """
    key, equals, raw = text.removeprefix("--").partition("=")
    if not equals:
        raise OverrideError(f"there is no value; write {text}=VALUE (to switch something on, =true)")
    return _parse_key(key), _parse_value(raw)


def _parse_key(text: str) -> list[str]:
    try:
        table: Any = tomllib.loads(f"{text} = 0")
    except tomllib.TOMLDecodeError:
        raise OverrideError(f"{text!r} is not a key; write --section.key=value") from None
    path = []
    while isinstance(table, dict):
        [(part, table)] = table.items()
        path.append(part)
    return path


def _parse_value(raw: str) -> Any:
    """The value as TOML, or else as a bare string: `--train.precision=bf16` needs no quotes."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    return parsed["value"] if list(parsed) == ["value"] else raw


def _put(root: Node, path: list[str], node: Node) -> None:
    parent: Any = root
    for depth, key in enumerate(path[:-1], start=1):
        if isinstance(parent.value, dict):
            parent = parent.value.setdefault(key, Node({}, node.origin))
        else:
            parent = parent.value[_index(parent, key, path[: depth - 1])]
        if not isinstance(parent.value, dict | list):
            where = ".".join(path[:depth])
            raise OverrideError(f"{where} is {parent.value!r} ({parent.origin}), not a table", ".".join(path))
    node.replaced = parent.child(path[-1])
    last = path[-1] if isinstance(parent.value, dict) else _index(parent, path[-1], path[:-1])
    parent.value[last] = node


def _index(parent: Node, key: str, path: list[str]) -> int:
    where, count = ".".join(path), len(parent.value)
    if not key.isdecimal():
        raise OverrideError(f"{where} is an array: {key!r} is no index into it", f"{where}.{key}")
    if int(key) >= count:
        entries = "no entries" if not count else "one, number 0" if count == 1 else f"{count}, numbers 0 to {count - 1}"
        raise OverrideError(f"there is no entry {key}; {where} has {entries}", f"{where}.{key}")
    return int(key)
