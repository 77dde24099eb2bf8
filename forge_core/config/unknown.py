"""Problems of unknown keys: misspelt, misplaced, or left over from another type."""

from __future__ import annotations

from collections.abc import Iterator

from forge_core.config.structure import Findings, UnknownKey
from forge_core.config.tree import Node, flag
from forge_core.config.walk import key_fields
from forge_core.contracts.components import Component
from forge_core.contracts.errors import SURE, Problem, closest, did_you_mean
from forge_core.plugins.catalog import Catalog


def explain_unknown(unknown: UnknownKey, findings: Findings, root: Node, catalog: Catalog) -> Problem:
    """The problem that an unknown key is, with the likely reason."""
    path = f"{unknown.table}.{unknown.key}" if unknown.table else unknown.key
    node = list(root.along(path))[-1]
    what = "unknown section" if not unknown.table and isinstance(node.value, dict) else "unknown key"
    hint = (
        _left_over(unknown, root, node)
        or _misspelt_or_misplaced(unknown, findings)
        or did_you_mean(unknown.key, key_fields(unknown.cls))
        or _known_keys(unknown, catalog)
    )
    return Problem(path, what + hint, str(node.origin))


def _left_over(unknown: UnknownKey, root: Node, key: Node) -> str:
    """A later layer changed the table's type, and this key is of the old one."""
    table = list(root.along(unknown.table))[-1]
    type_ = table.child("type")
    if type_ is None or key.origin.layer >= type_.origin.layer:
        return ""
    for old in _replaced(type_):
        if old.value != type_.value:
            kind = unknown.cls.kind if issubclass(unknown.cls, Component) else "table"
            hint = _whole_table(unknown.table, str(type_.value)) if type_.origin.is_flag else "remove it there"
            return f" (left over from {kind} {old.value!r} in {old.origin}); {hint}"
    return ""


def _replaced(node: Node) -> Iterator[Node]:
    while node.replaced is not None:
        node = node.replaced
        yield node


def _whole_table(path: str, type_: str) -> str:
    return "replace the whole table: " + flag(path, f'{{type = "{type_}"}}')


def _misspelt_or_misplaced(unknown: UnknownKey, findings: Findings) -> str:
    """The table has a key of nearly that name, or another table one of just that name."""
    tables = [path for path, cls in findings.tables.items() if unknown.key in key_fields(cls) and path != unknown.table]
    if "" in tables:
        return f"; [{unknown.key}] is a section of its own"
    close = closest(unknown.key, key_fields(unknown.cls), SURE)
    places = " or ".join(f"[{path}]" for path in tables)
    if close and places:
        return f"; did you mean {close!r}, or {unknown.key!r} in {places}?"
    if places:
        return f"; {unknown.key!r} belongs in {places}"
    return f"; did you mean {close!r}?" if close else ""


def _known_keys(unknown: UnknownKey, catalog: Catalog) -> str:
    """No close match: list all keys of the table, and its type, which the table need not name."""
    keys = ", ".join(key_fields(unknown.cls)) or "no keys"
    if issubclass(unknown.cls, Component):
        return f" of {unknown.cls.kind} {catalog.type_of(unknown.cls)!r}, which has {keys}"
    return f"; [{unknown.table}] has {keys}" if unknown.table else f"; there are {keys}"
