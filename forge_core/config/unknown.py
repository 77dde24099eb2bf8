"""What to say about a key that its table does not have: misspelt, misplaced, or left over from another type."""

from __future__ import annotations

from collections.abc import Iterator

from forge_core.config.structure import Findings, UnknownKey
from forge_core.config.tree import Node, flag
from forge_core.config.walk import key_fields
from forge_core.contracts.components import Component
from forge_core.contracts.errors import SURE, Problem, closest, did_you_mean
from forge_core.plugins.catalog import Catalog


def explain_unknown(found: UnknownKey, findings: Findings, root: Node, catalog: Catalog) -> Problem:
    """The problem that an unknown key is, with the likely reason."""
    path = f"{found.table}.{found.key}" if found.table else found.key
    node = list(root.along(path))[-1]
    what = "unknown section" if not found.table and isinstance(node.value, dict) else "unknown key"
    hint = (
        _left_over(found, root, node)
        or _misspelt_or_misplaced(found, findings)
        or did_you_mean(found.key, key_fields(found.cls))
        or _known_keys(found, catalog)
    )
    return Problem(path, what + hint, str(node.origin))


def _left_over(found: UnknownKey, root: Node, key: Node) -> str:
    """A later layer changed the table's type, and this key is of the old one."""
    table = list(root.along(found.table))[-1]
    type_ = table.child("type")
    if type_ is None or key.origin.layer >= type_.origin.layer:
        return ""
    for old in _replaced(type_):
        if old.value != type_.value:
            kind = found.cls.kind if issubclass(found.cls, Component) else "table"
            fix = _whole_table(found.table, str(type_.value)) if type_.origin.is_flag else "remove it there"
            return f" (left over from {kind} {old.value!r} in {old.origin}); {fix}"
    return ""


def _replaced(node: Node) -> Iterator[Node]:
    while node.replaced is not None:
        node = node.replaced
        yield node


def _whole_table(path: str, type_: str) -> str:
    return "replace the whole table: " + flag(path, f'{{type = "{type_}"}}')


def _misspelt_or_misplaced(found: UnknownKey, findings: Findings) -> str:
    """The table has a key of nearly that name, or another table one of just that name."""
    tables = [path for path, cls in findings.tables.items() if found.key in key_fields(cls) and path != found.table]
    if "" in tables:
        return f"; [{found.key}] is a section of its own"
    close = closest(found.key, key_fields(found.cls), SURE)
    places = " or ".join(f"[{path}]" for path in tables)
    if close and places:
        return f"; did you mean {close!r}, or {found.key!r} in {places}?"
    if places:
        return f"; {found.key!r} belongs in {places}"
    return f"; did you mean {close!r}?" if close else ""


def _known_keys(found: UnknownKey, catalog: Catalog) -> str:
    """Nothing is similar, so all that there is. The table may not name its type, so that is told too."""
    keys = ", ".join(key_fields(found.cls)) or "no keys"
    if issubclass(found.cls, Component):
        return f" of {found.cls.kind} {catalog.type_of(found.cls)!r}, which has {keys}"
    return f"; [{found.table}] has {keys}" if found.table else f"; there are {keys}"
