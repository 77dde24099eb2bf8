"""Diff between the job of a checkpoint and the current one, and what each change means for a run that continues.

Two resolved jobs are compared key by key. What a change means is stated where the key is defined: by `when_resumed` in
the field's metadata, or else by the `resumes_as` of the component around it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from attrs import NOTHING, Attribute, frozen

from forge_core.config.describe import (
    is_array,
    is_component,
    is_mapping,
    is_section,
    is_table,
    item_type,
    members,
    toml_text,
)
from forge_core.config.dump import dump_job, to_toml
from forge_core.config.structure import resolved_fields
from forge_core.config.walk import default_of, walk_components
from forge_core.contracts.components import Component, DefaultType, WhenResumed
from forge_core.contracts.errors import PluginError
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog

TITLES: Mapping[WhenResumed, str] = {
    "safe": "safe",
    "flag": "need --resume-with-changes",
    "impossible": "impossible",
}
RANK: Mapping[WhenResumed, int] = {means: rank for rank, means in enumerate(TITLES)}
SHORT = 60
"""Characters of a value that are shown."""


@frozen
class Change:
    """One changed key. A component that was added, removed or replaced is one change, of its `type`."""

    path: str
    before: Any
    """The value as in TOML; None: absent."""
    after: Any
    means: WhenResumed

    def __str__(self) -> str:
        return f"{self.path}: {_shown(self.before)} -> {_shown(self.after)}"


def job_changes(before: str, job: Job, catalog: Catalog) -> list[Change]:
    """The changes from a checkpoint's resolved job (TOML) to `job`, in the order of the file."""
    classes = {type(component) for _, component in walk_components(job)}
    return text_changes(before, dump_job(job, catalog), catalog, classes)


def text_changes(before: str, after: str, catalog: Catalog, classes: Iterable[type[Component]] = ()) -> list[Change]:
    """The changes between two resolved jobs.

    Args:
        before: the older job, as TOML.
        after: the newer job, as TOML.
        catalog: where components are looked up.
        classes: component classes that are loaded already.
    """
    leaves = _Leaves(classes, catalog)
    olds, news = (dict(leaves.of(tomllib.loads(text))) for text in (before, after))
    changed = [path for path in {**news, **olds} if _differ(path, olds, news)]
    replaced = [path for path in changed if path.endswith(".type")]
    return [_change(path, olds.get(path), news.get(path)) for path in changed if not _inside(path, replaced)]


def describe_changes(changes: Iterable[Change]) -> str:
    """The changes in groups, the most serious last; empty without changes."""
    changes, lines = list(changes), []
    for means, title in TITLES.items():
        listed = [f"    {change}" for change in changes if change.means == means]
        lines += [f"  {title}:", *listed] if listed else []
    return "\n".join(lines)


def gravest(changes: Sequence[Change]) -> WhenResumed:
    """The most serious meaning among changes; `safe` without any."""
    return max((change.means for change in changes), key=RANK.__getitem__, default="safe")


@frozen
class _Leaf:
    """A value of a job that is neither table nor array of tables, and what its change means."""

    value: Any
    means: WhenResumed
    is_default: bool = False
    known: bool = True
    """Whether the class that reads the table has such a key."""


class _Leaves:
    """Goes through a resolved job along the types of its fields."""

    def __init__(self, classes: Iterable[type[Component]], catalog: Catalog) -> None:
        self._classes = {_place_free(catalog.type_of(cls)): cls for cls in classes}
        self._catalog = catalog

    def of(self, job: Mapping[str, Any]) -> Iterator[tuple[str, _Leaf]]:
        """Every leaf with its path."""
        return self._table("", Job, job, "flag")

    def _table(self, path: str, cls: type, table: Mapping[str, Any], means: WhenResumed) -> Iterator[tuple[str, _Leaf]]:
        fields = resolved_fields(cls)
        for key, value in table.items():
            here, f = f"{path}.{key}" if path else key, fields.get(key)
            if key == "type" and issubclass(cls, Component):
                continue
            if f is None:
                yield here, _Leaf(value, means, known=False)
            else:
                word = f.metadata.get("when_resumed", means)
                yield from self._value(here, f.type, value, word, f)

    def _value(
        self, path: str, type_: Any, value: Any, means: WhenResumed, f: Attribute | None = None
    ) -> Iterator[tuple[str, _Leaf]]:
        """`f` is the field that holds the value itself, if there is one."""
        kinds = members(type_)
        entries = item_type(next((kind for kind in kinds if is_array(kind) or is_mapping(kind)), Any))
        if isinstance(value, list) and is_table(entries):
            for name, item in _names(value):
                yield from self._value(f"{path}.{name}", entries, item, means)
        elif not isinstance(value, dict):
            yield path, _Leaf(value, means, f is not None and self._is_default(value, f))
        elif base := next(filter(is_component, kinds), None):
            yield from self._component(path, base, value, means, f)
        elif section := next(filter(is_section, kinds), None):
            yield from self._table(path, section, value, means)
        else:
            for name, item in value.items():
                yield from self._value(f"{path}.{name}", entries, item, means)

    def _component(
        self, path: str, base: type[Component], table: Mapping[str, Any], means: WhenResumed, f: Attribute | None
    ) -> Iterator[tuple[str, _Leaf]]:
        cls = self._class(base, table.get("type", ""))
        if f is None or "when_resumed" not in f.metadata:
            means = cls.resumes_as or means
        is_default = f is not None and self._is_default(table, f)
        yield f"{path}.type", _Leaf(table.get("type"), base.type_resumes_as or means, is_default)
        yield from self._table(path, cls, table, means)

    def _class(self, base: type[Component], type_: str) -> type[Component]:
        """The class of a component, or its kind's base if unknown. No path that an old job names is imported."""
        known = self._classes.get(_place_free(type_))
        if known is not None or ":" in type_:
            return known or base
        try:
            return self._catalog.load(base.kind, type_, base)
        except PluginError:
            return base

    def _is_default(self, value: Any, f: Attribute) -> bool:
        default = default_of(f)
        if isinstance(default, DefaultType):
            return isinstance(value, dict) and _bare(value.get("type", "")) == _bare(default.type)
        return default is not NOTHING and default is not None and _same(value, to_toml(default, self._catalog))


def _names(tables: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Entries of an array of tables, by their `name` or else their number."""
    names = [str(table.get("name") or number) for number, table in enumerate(tables)]
    distinct = len(set(names)) == len(names)
    return [(names[number] if distinct else str(number), table) for number, table in enumerate(tables)]


def _differ(path: str, olds: Mapping[str, _Leaf], news: Mapping[str, _Leaf]) -> bool:
    """Whether a key has changed. A key that a newer version added changes nothing as long as it has its default."""
    if path not in olds:
        return not news[path].is_default
    return path not in news or not _same(olds[path].value, news[path].value)


def _inside(path: str, replaced: Iterable[str]) -> bool:
    """Whether a key belongs to a component that was added, removed or replaced."""
    return any(path != type_ and path.startswith(type_.removesuffix("type")) for type_ in replaced)


def _change(path: str, old: _Leaf | None, new: _Leaf | None) -> Change:
    leaves = [leaf for leaf in (old, new) if leaf is not None]
    means = max((leaf.means for leaf in leaves), key=RANK.__getitem__)
    if not any(leaf.known for leaf in leaves):  # a newer version dropped the key, and with it what it meant
        means = min(means, "flag", key=RANK.__getitem__)
    return Change(path, old and old.value, new and new.value, means)


def _same(one: Any, other: Any) -> bool:
    """Whether two values of TOML are equal: NaN equals itself, and a local file may have moved."""
    return one == other or repr(one) == repr(other) or _place_free(one) == _place_free(other)


def _place_free(value: Any) -> Any:
    """A type that names a local file without the folder of the file; anything else as it is."""
    is_file = isinstance(value, str) and value.rpartition(":")[0].endswith(".py")
    return PurePath(value).name if is_file else value


def _bare(type_: str) -> str:
    return type_.rpartition("/")[2]


def _shown(value: Any) -> str:
    text = "(none)" if value is None else _toml(value)
    return text if len(text) <= SHORT else f"{text[: SHORT - 1]}…"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(item)}' for key, item in value.items())}}}"
    return toml_text(value)
