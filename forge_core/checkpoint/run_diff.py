"""Diff between the run that saved a checkpoint and the present one: its job, and its provenance (plugins, local files).

Two resolved jobs are compared key by key. The meaning of a change is stated where the key is defined: by `when_resumed`
in the field's metadata, or else by the `resumes_as` of the component around it.
"""

from __future__ import annotations

import functools
import platform
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

from attrs import NOTHING, Attribute, frozen

from forge_core.config import field_types
from forge_core.config.keys import default_of, resolved_fields, walk_components
from forge_core.config.load import dump_job, to_toml
from forge_core.contracts.components import Component, DefaultType, WhenResumed
from forge_core.contracts.data import Tokenizer
from forge_core.contracts.errors import PluginError, ResumeError
from forge_core.job import Job
from forge_core.plugins.catalog import CORE, Catalog, Distribution, core_version

TITLES: Mapping[WhenResumed, str] = {"safe": "safe", "flag": "need --resume-with-changes", "impossible": "impossible"}
"""Title of each meaning in messages, the most serious meaning last."""
severity = tuple(TITLES).index
SHORT = 60
"""Characters of a value that are shown."""

# --- changes in the job ------------------------------------------------------------------------------------------


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
    """The changes between two resolved jobs (TOML); `classes` are component classes that are loaded already."""
    leaves = _Leaves(classes, catalog)
    olds, news = (dict(leaves.table("", Job, tomllib.loads(text), "flag")) for text in (before, after))
    changed = [path for path in {**news, **olds} if _differ(path, olds, news)]
    # A component that was added, removed or replaced is one change, of its type: all other keys in it are left out
    replaced = tuple(path.removesuffix("type") for path in changed if path.endswith(".type"))
    outermost = [path for path in changed if not path.removesuffix(".type").startswith(replaced)]
    return [_change(path, olds.get(path), news.get(path)) for path in outermost]


def describe_changes(changes: Iterable[Change]) -> str:
    """The changes in groups, the most serious last; empty without changes."""
    changes, lines = list(changes), []
    for means, title in TITLES.items():
        listed = [f"    {change}" for change in changes if change.means == means]
        lines += [f"  {title}:", *listed] if listed else []
    return "\n".join(lines)


@frozen
class _Leaf:
    """A value of a job that is neither table nor array of tables, and what its change means."""

    value: Any
    means: WhenResumed
    is_default: bool = False


_NamedLeaves = Iterator[tuple[str, _Leaf]]


class _Leaves:
    """Goes through a resolved job along the types of its fields."""

    def __init__(self, classes: Iterable[type[Component]], catalog: Catalog) -> None:
        self._classes = {_without_folder(catalog.type_of(cls)): cls for cls in classes}
        self._catalog = catalog

    def table(self, path: str, cls: type, table: Mapping[str, Any], means: WhenResumed) -> _NamedLeaves:
        """Every leaf of a table that `cls` reads, with its path."""
        fields = resolved_fields(cls)
        for key, value in table.items():
            here, f = f"{path}.{key}" if path else key, fields.get(key)
            if key == "type" and issubclass(cls, Component):
                continue
            if f is None:  # a newer version dropped the key, and with it the meaning of its changes
                yield here, _Leaf(value, min(means, "flag", key=severity))
            else:
                yield from self._value(here, f.type, value, f.metadata.get("when_resumed", means), f)

    def _value(self, path: str, type_: Any, value: Any, means: WhenResumed, f: Attribute | None = None) -> _NamedLeaves:
        """`f` is the field that holds the value itself, if there is one."""
        kinds = field_types.members(type_)
        entries = field_types.item_type(type_)
        if isinstance(value, list) and field_types.is_table(entries):
            yield from self._value(path, Mapping[str, entries], dict(_by_name(value)), means)  # type: ignore[valid-type]
        elif not isinstance(value, dict):
            yield path, _Leaf(value, means, f is not None and self._is_default(value, f))
        elif base := next(filter(field_types.is_component, kinds), None):
            yield from self._component(path, base, value, means, f)
        elif section := next(filter(field_types.is_section, kinds), None):
            yield from self.table(path, section, value, means)
        else:
            for name, item in value.items():
                yield from self._value(f"{path}.{name}", entries, item, means)

    def _component(
        self, path: str, base: type[Component], table: Mapping[str, Any], means: WhenResumed, f: Attribute | None
    ) -> _NamedLeaves:
        type_ = self._catalog.as_spelled_now(table.get("type", base.usual_type or ""))
        cls = self._class(base, type_)
        if f is None or "when_resumed" not in f.metadata:  # the field is closer to the key than the component's class
            means = cls.resumes_as or means
        is_default = f is not None and self._is_default(table, f)
        yield f"{path}.type", _Leaf(type_, base.type_resumes_as or means, is_default)
        yield from self.table(path, cls, table, means)

    def _class(self, base: type[Component], type_: str) -> type[Component]:
        """The class of a component, or its kind's base if unknown."""
        known = self._classes.get(_without_folder(type_))
        if known is not None or ":" in type_:  # a path in the job of a checkpoint is not imported: it may be anyone's
            return known or base
        try:
            return self._catalog.load(base.kind, type_, base)
        except PluginError:
            return base

    def _is_default(self, value: Any, f: Attribute) -> bool:
        default = default_of(f)
        if isinstance(default, DefaultType):
            return isinstance(value, dict) and value.get("type", "").split("/")[-1] == default.type.split("/")[-1]
        return default not in (NOTHING, None) and _same(value, to_toml(default, self._catalog))


def _by_name(tables: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Entries of an array of tables, by their `name` or else their number."""
    numbers = list(map(str, range(len(tables))))
    names = [str(table.get("name") or number) for number, table in zip(numbers, tables, strict=True)]
    return zip(names if len(set(names)) == len(names) else numbers, tables, strict=True)


def _differ(path: str, olds: Mapping[str, _Leaf], news: Mapping[str, _Leaf]) -> bool:
    """Whether a key has changed. A key that a newer version added changes nothing as long as it has its default."""
    if path not in olds:
        return not news[path].is_default
    return path not in news or not _same(olds[path].value, news[path].value)


def _change(path: str, old: _Leaf | None, new: _Leaf | None) -> Change:
    means = max((leaf.means for leaf in (old, new) if leaf is not None), key=severity)
    return Change(path, old and old.value, new and new.value, means)


def _same(one: Any, other: Any) -> bool:
    """Whether two values of TOML are equal: NaN equals itself, and a local file may have moved."""
    return one == other or repr(one) == repr(other) or _without_folder(one) == _without_folder(other)


def _without_folder(value: Any) -> Any:
    """A type that names a local file without the folder of the file; anything else as it is."""
    return PurePath(value).name if isinstance(value, str) and value.rpartition(":")[0].endswith(".py") else value


def _shown(value: Any) -> str:
    text = "(none)" if value is None else field_types.toml_text(value)
    return text if len(text) <= SHORT else f"{text[: SHORT - 1]}…"


# --- provenance --------------------------------------------------------------------------------------------------


def collect_provenance(job: Job, catalog: Catalog, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """Record of everything that shapes a run apart from its job's values, as plain types; no environment variables.

    It has `components` (path -> type), `distributions` that the job uses (name -> version, and commit of an editable
    one), `files` (local component files -> SHA-256), the tokenizer's fingerprint, versions of Python and torch, and the
    CPU threads that compute (0: GPUs do), as sums depend on their number.
    """
    import torch

    components = {path: catalog.type_of(type(component)) for path, component in walk_components(job)}
    used = {CORE, *(type_.split("/")[0] for type_ in components.values() if ":" not in type_)}
    known = {name: catalog.distribution(name) for name in sorted(used)}
    return {
        "components": components,
        "distributions": {name: _describe(dist) for name, dist in known.items() if dist is not None},
        "files": dict(catalog.files),
        "tokenizer": None if tokenizer is None else tokenizer.fingerprint(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "threads": 0 if torch.accelerator.is_available() else torch.get_num_threads(),
    }


def compare_provenance(
    recorded: Mapping[str, Any], current: Mapping[str, Any], catalog: Catalog, with_changes: bool = False
) -> list[str]:
    """Warnings for a run that continues with other versions or local files than `recorded`.

    Raises a `CheckpointError` if a distribution is not installed any more, unless `with_changes`.
    """
    missing, warnings = [], []
    for recorded_name, was in recorded["distributions"].items():
        name = catalog.as_spelled_now(recorded_name)
        now = current["distributions"].get(name)
        if now is None and not any(metadata.distributions(name=name)):
            missing.append(f"{name}=={was['version']}")
        elif now is not None and now != was:
            warnings.append(f"{name} was {_version(was)} when the checkpoint was saved, and is {_version(now)} now")
    if missing:
        used = f"the checkpoint used {', '.join(missing).replace('==', ' ')}, which is not installed"
        if not with_changes:
            raise ResumeError(f"{used}: pip install {' '.join(missing)}; or continue without it: --resume-with-changes")
        warnings.append(used)
    machine = ((name, recorded.get(name), current.get(name)) for name in ("python", "torch", "threads"))
    warnings += [
        f"{name} was {was} when the checkpoint was saved, and is {now} now"
        for name, was, now in machine
        if was not in (None, now)
    ]
    # A local file that has moved is known by its name
    now_at = {Path(path).name: digest for path, digest in current["files"].items()} | dict(current["files"])
    return warnings + [
        f"{path} has changed since the checkpoint was saved"
        for path, digest in recorded["files"].items()
        if now_at.get(path, now_at.get(Path(path).name, digest)) != digest
    ]


def check_tokenizer(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise a `CheckpointError` if the run has another tokenizer than it began with: its ids mean other texts."""
    if recorded.get("tokenizer") != current.get("tokenizer"):
        raise ResumeError("the checkpoint was trained with another tokenizer than this run has")


def _describe(dist: Distribution) -> dict[str, str]:
    described = {"version": core_version() if dist.name == CORE else dist.version}
    if dist.editable_path is not None:
        described["commit"] = _commit(dist.editable_path)
    return described


@functools.cache
def _commit(path: Path) -> str:
    """`git describe` of an editable install, whose version does not identify its code; empty outside a repository."""
    command = ["git", "-C", str(path), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _version(described: Mapping[str, str]) -> str:
    commit = described.get("commit")
    return described["version"] + (f" ({commit})" if commit else "")
