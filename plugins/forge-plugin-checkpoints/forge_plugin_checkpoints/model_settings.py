"""Compares the settings of the model that trained a checkpoint and of the model that loads its weights."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tomli_w
from attrs import evolve, fields, frozen, has

from forge_core.checkpoint.run_diff import Change, text_changes
from forge_core.config.keys import walk_components
from forge_core.config.load import dump_job
from forge_core.contracts.errors import JobError, Problem
from forge_core.plugins.catalog import Catalog
from forge_plugin_checkpoints.parts import fits

if TYPE_CHECKING:
    from torch import Size

    from forge_core.contracts.components import Component
    from forge_core.job import Job

Table = Mapping[str, Any]


@frozen
class Settings:
    """Settings of the model that differ from those that the weights were trained with."""

    refused: Sequence[Change]
    """They make it another function, and the shapes of the weights are equal all the same."""
    accepted: Sequence[Change]
    """As `accept_changes` allows."""
    others: Sequence[Change]
    """The names or shapes of the weights differ too, maybe because of them."""


def compare_settings(
    before: str,
    job: Job,
    names: Collection[str],
    accept: Sequence[str],
    own: Mapping[str, Size],
    stored: Mapping[str, Size],
) -> Settings:
    """Compare `[model]` of the resolved job `before` and of `job`.

    Args:
        before: of the run that trained the weights (TOML); empty where no run did, and nothing is known.
        job: the job that loads them.
        names: of the tensors that are loaded. If all are of one part (`vision.encoder.*`), only its settings count.
        accept: patterns of keys that may differ.
        own: shapes of the model's tensors.
        stored: shapes of the checkpoint's tensors.
    """
    catalog = Catalog.installed()
    old, new = (tomllib.loads(text).get("model", {}) for text in (before, dump_job(job, catalog)))
    classes = {type(component) for _, component in walk_components(job)}
    path, prefix = _part(new, names)
    changes = [
        change
        for change in _changes(old, new, catalog, classes)
        if change.means != "safe" and f"{change.path}.".startswith(f"{path}.") and not trains_only(job, change.path)
    ]
    others = _other_parts({**old, **new}, names)
    compared = [name for name in {**own, **stored} if name.startswith(prefix) and not name.startswith(others)]
    same_tensors = all(own.get(name) == stored.get(name) for name in compared)
    accepted = [change for change in changes if fits([change.path], accept)]
    left = [change for change in changes if change not in accepted]
    refused = [change for change in left if _is_hidden(change) or (same_tensors and not _is_size(change))]
    return Settings(refused, accepted, [change for change in left if change not in refused])


def _is_hidden(change: Change) -> bool:
    """Whether a key never changes a name or shape, and both models have it."""
    return change.means == "flag" and change.before is not None and change.after is not None


def _is_size(change: Change) -> bool:
    """Whether one side derives a size (`head_dim = 0`) that the other states: of equal shapes, it is the same."""
    # Not by `isinstance`, for which False is the integer 0
    numbers = [value for value in (change.before, change.after) if type(value) is int]
    return change.means == "impossible" and len(numbers) == 2 and 0 in numbers


def trains_only(job: Job, path: str) -> bool:
    """Whether a key, or a table around it, is declared to have no effect on what the weights compute."""
    value: Any = job
    for key in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(key)
            continue
        field = next((field for field in fields(type(value)) if field.name == key), None) if has(type(value)) else None
        if field is None or field.metadata.get("training_only"):
            return field is not None
        value = getattr(value, key)
    return False


def refuse(table: str, folder: object, changes: Sequence[Change]) -> None:
    """Raise a `JobError` that lists the changes, if there are any."""
    if changes:
        keys = ", ".join(f'"{change.path}"' for change in changes)
        message = (
            f"the weights of {folder} were trained with other settings, and no shape shows it: "
            f"{'; '.join(map(str, changes))}. Set these as they were, or accept them: accept_changes = [{keys}]"
        )
        raise JobError([Problem(f"{table}.accept_changes", message)])


def _changes(old: Table, new: Table, catalog: Catalog, classes: Collection[type[Component]]) -> Iterator[Change]:
    for path, one, other in _pairs(old, new):
        before, after = (tomli_w.dumps({"model": table}) for table in (one, other))
        for change in text_changes(before, after, catalog, classes):
            yield evolve(change, path=path + change.path.removeprefix("model"))


def _pairs(old: Table, new: Table) -> Iterator[tuple[str, Table, Table]]:
    """Yields the parts that both models have, with the path in the new one: a language model may get a tower, too."""
    if not old or old.get("type") == new.get("type"):
        yield from [("model", old, new)] if old else []
        return
    olds, news = dict(_components("model", old)), dict(_components("model", new))
    counts = [Counter(part["type"] for part in parts.values()) for parts in (olds, news)]
    places = {part["type"]: path for path, part in news.items()}
    done: list[str] = []
    for path, part in olds.items():
        # Of a type that occurs twice, the wrong pair might be compared
        once = all(count[part["type"]] == 1 for count in counts)
        # What lies inside a pair is compared with it
        if once and not any(path.startswith(f"{outer}.") for outer in done):
            done.append(path)
            yield places[part["type"]], part, news[places[part["type"]]]


def _components(path: str, table: Table) -> Iterator[tuple[str, Table]]:
    """Yields the tables of components, those inside another one after it."""
    if "type" in table:
        yield path, table
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _components(f"{path}.{key}", value)


def _part(model: Table, names: Collection[str]) -> tuple[str, str]:
    """Returns the path of the innermost table that has all of these tensors, and what their names begin with."""
    path = "model"
    prefix = ""
    while True:
        keys = {name.removeprefix(prefix).split(".")[0] for name in names}
        inner = model.get(next(iter(keys))) if len(keys) == 1 else None
        if not isinstance(inner, dict):
            return path, prefix
        (key,) = keys
        path, prefix, model = f"{path}.{key}", f"{prefix}{key}.", inner


def _other_parts(model: Table, names: Collection[str]) -> tuple[str, ...]:
    """Returns what names of tensors begin with that belong to parts of which none is loaded, such as a tower."""
    loaded = {name.split(".")[0] for name in names}
    return tuple(f"{key}." for key, value in model.items() if isinstance(value, dict) and key not in loaded)
