"""The raw job before it has types: tables, arrays and scalars that remember where they were written."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from attrs import define, frozen

from forge_core.config.lines import KeyPath


@frozen
class Origin:
    """Where a value was written: a line of a file, or a command-line flag."""

    source: str
    line: int = 0
    """Counted from 1; 0 where it is not known."""
    layer: int = 0
    """Rank in the order of precedence: files from left to right, then flags."""

    @property
    def is_flag(self) -> bool:
        return self.source.startswith("--")

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@define
class Node:
    """One value of the tree. `value` is a dict of nodes, a list of nodes, or a scalar."""

    value: Any
    origin: Origin
    replaced: Node | None = None
    """The node of an earlier layer that this one replaced."""

    def plain(self) -> Any:
        """The value without origins."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def child(self, key: str) -> Node | None:
        """Entry of a table, or of an array by index."""
        if isinstance(self.value, dict):
            return self.value.get(key)
        if isinstance(self.value, list) and key.isdecimal() and int(key) < len(self.value):
            return self.value[int(key)]
        return None

    def along(self, path: str) -> Iterator[Node]:
        """The nodes on the way along a dotted path, this one first, as far as they exist."""
        yield self
        parts = path.split(".") if path else []
        for end in range(len(parts), 0, -1):  # a quoted key may itself have dots: the longest that exists
            child = self.child(".".join(parts[:end]))
            if child is not None:
                yield from child.along(".".join(parts[end:]))
                return

    def origin_of(self, path: str) -> Origin:
        """Where the key at `path` was written, or else the innermost table above it."""
        return list(self.along(path))[-1].origin


def annotate(value: Any, lines: dict[KeyPath, int], origin: Origin, path: KeyPath = ()) -> Node:
    """The tree of what `tomllib` read. A key whose line is not known takes that of its table."""
    origin = Origin(origin.source, lines.get(path, origin.line), origin.layer)
    if isinstance(value, dict):
        return Node({key: annotate(item, lines, origin, (*path, key)) for key, item in value.items()}, origin)
    if isinstance(value, list):
        return Node([annotate(item, lines, origin, (*path, index)) for index, item in enumerate(value)], origin)
    return Node(value, origin)


def merge(base: Node, layer: Node) -> Node:
    """`layer` over `base`: tables merge deeply, anything else replaces."""
    if not (isinstance(base.value, dict) and isinstance(layer.value, dict)):
        return Node(layer.value, layer.origin, replaced=base)
    merged = dict(base.value)
    for key, node in layer.value.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    return Node(merged, layer.origin, replaced=base)


def flag(path: str, toml: str) -> str:
    """The command-line flag that sets a key, quoted for a shell."""
    return f"--{path}={shlex.quote(toml)}"
