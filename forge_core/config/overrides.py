"""Command-line overrides: `--optimizer.lr=1e-3`, `--data.sources.0.weight=2`, `--optimizer='{type = "adamw"}'`."""

from __future__ import annotations

import tomllib
from typing import Any

from forge_core.config.tree import Node, Origin, annotate
from forge_core.contracts.errors import Problem

SHOWN = 60
"""Characters of a flag that error messages show."""


class OverrideError(Exception):
    """An override that cannot be applied. `path` is the key at fault, empty if the flag itself is malformed."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


def apply_override(root: Node, text: str, layer: int) -> Problem | None:
    """Set one key of the tree, in place; gives what is wrong with the override, if anything.

    Tables on the way that do not exist are created, so that a misspelt one is found as an unknown key later.
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
        OverrideError: there is no value, or the key is not a TOML key.
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
    """TOML, or a bare string where it is not: `--train.precision=bf16` needs no quotes."""
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
