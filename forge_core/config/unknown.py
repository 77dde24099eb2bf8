"""What to say about a key that its table does not have: misspelt, in the wrong table, or left over from another type."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from forge_core.components import Component
from forge_core.config.structure import Findings, UnknownKey
from forge_core.config.suggest import did_you_mean
from forge_core.config.tree import Node, flag
from forge_core.errors import Problem
from forge_core.plugins.catalog import Catalog

SURE = 0.8
"""Similarity from which a key is rather a misspelling than a key of another table."""


def explain_unknown(found: UnknownKey, findings: Findings, root: Node, catalog: Catalog) -> Problem:
    """The problem that an unknown key is, with the likely reason."""
    path = f"{found.table}.{found.key}" if found.table else found.key
    node = list(root.along(path))[-1]
    what = "unknown section" if not found.table and isinstance(node.value, dict) else "unknown key"
    hint = (
        _left_over(found, root, node, findings)
        or did_you_mean(found.key, _keys(findings.tables[found.table]), SURE)
        or _belongs(found, findings)
        or did_you_mean(found.key, _keys(findings.tables[found.table]))
        or _by_default(found, root, findings, catalog)
    )
    return Problem(path, what + hint, str(node.origin))


def _keys(cls: type) -> list[str]:
    return [f.alias for f in attrs.fields(cls) if f.init]


def _left_over(found: UnknownKey, root: Node, key: Node, findings: Findings) -> str:
    """A later layer changed the table's type, and this key is of the old one."""
    table = list(root.along(found.table))[-1]
    type_ = table.child("type")
    if type_ is None or key.origin.layer >= type_.origin.layer:
        return ""
    for old in _replaced(type_):
        if old.value != type_.value:
            kind = findings.tables[found.table].kind  # type: ignore[attr-defined]
            fix = _whole_table(found.table, str(type_.value)) if type_.origin.is_flag else "remove it there"
            return f" (left over from {kind} {old.value!r} in {old.origin}); {fix}"
    return ""


def _replaced(node: Node) -> Iterator[Node]:
    while node.replaced is not None:
        node = node.replaced
        yield node


def _whole_table(path: str, type_: str) -> str:
    return "replace the whole table: " + flag(path, f'{{type = "{type_}"}}')


def _belongs(found: UnknownKey, findings: Findings) -> str:
    """Another table of the job has a key of that name."""
    tables = [path for path, cls in findings.tables.items() if found.key in _keys(cls) and path != found.table]
    if not tables:
        return ""
    if "" in tables:
        return f"; [{found.key}] is a section of its own"
    return f"; {found.key!r} belongs in {' or '.join(f'[{path}]' for path in tables)}"


def _by_default(found: UnknownKey, root: Node, findings: Findings, catalog: Catalog) -> str:
    """The table does not name its type, so the user may not know which component it configures."""
    cls = findings.tables[found.table]
    if not issubclass(cls, Component) or list(root.along(found.table))[-1].child("type") is not None:
        return ""
    return f" of {cls.kind} {catalog.type_of(cls)!r}"
