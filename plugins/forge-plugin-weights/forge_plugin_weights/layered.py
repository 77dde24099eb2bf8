"""Keys of `[model.attention]` that differ between layers.

A job gives such layers as a `pattern`, whose kinds have names that mean nothing and whose list may be shorter than the
model. Fields see neither: to them, a key has one value, or a `PerLayer` with one for each layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from forge_plugin_weights.kinds import Flat, Unsupported

ATTENTION = "attention."
"""How paths of keys begin that may differ between layers."""
PATTERN = "forge-plugin-transformer/pattern"
NO_ROPE = "forge-plugin-transformer/none"
KIND = re.compile(r"^attention\.kinds\.[^.]+\.")


class Absent:
    """The type of `ABSENT`."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = Absent()
"""The value of a key in layers whose attention has no such key."""


@frozen(repr=False)
class PerLayer:
    """The values of a key that differ between layers."""

    values: tuple[Any, ...]

    def __repr__(self) -> str:
        shown = period(self.values)
        return f"{', '.join(map(repr, shown))} (by layer{', repeated' if len(shown) < len(self.values) else ''})"


def period(values: Sequence[Any]) -> list[Any]:
    """Returns the shortest list that, repeated, yields the values of all layers."""
    lengths = range(1, len(values) + 1)
    length = next(n for n in lengths if all(value == values[i % n] for i, value in enumerate(values)))
    return list(values[:length])


def of_layer(model: Flat, layer: int) -> Flat:
    """Returns the keys of a model as its layer `layer` has them."""
    values = {path: value.values[layer] if isinstance(value, PerLayer) else value for path, value in model.items()}
    return {path: value for path, value in values.items() if value is not ABSENT}


def of_layers(model: Flat) -> Sequence[Flat]:
    """Returns the keys of a model as each of its layers has them; raises `Unsupported` if it has no `layers`."""
    if "layers" not in model:
        raise Unsupported("there is no model.layers")
    return [of_layer(model, layer) for layer in range(model["layers"])]


def merged(layers: Sequence[Flat]) -> dict[str, Any]:
    """Returns the keys of all layers as one table, the opposite of `of_layers`."""
    # One layer, or the form that stands for all of them: nothing can differ.
    if len(layers) == 1:
        return dict(layers[0])
    paths = dict.fromkeys(path for layer in layers for path in layer)
    # Kinds of attention have different keys.
    by_path = {path: tuple(layer.get(path, ABSENT) for layer in layers) for path in paths}
    return {path: values[0] if all_equal(values) else PerLayer(values) for path, values in by_path.items()}


def all_equal(values: Sequence[Any]) -> bool:
    """Whether several values are one."""
    return all(value == values[0] for value in values)


def differs(value: Any) -> bool:
    """Whether a value, or one in it, is another in each layer."""
    return isinstance(value, PerLayer) or (isinstance(value, Mapping) and any(map(differs, value.values())))


def without_pattern(table: Flat) -> Sequence[Flat]:
    """Returns the keys of a job's model as each of its layers has them; once, if all are alike by its form."""
    if table.get("attention.type") != PATTERN or "layers" not in table:
        return [table]
    shared = {path: value for path, value in table.items() if not path.startswith(ATTENTION)}
    names = table["attention.layers"]
    kinds = {name: {**shared, **_below(f"attention.kinds.{name}.", table)} for name in names}
    return [kinds[names[layer % len(names)]] for layer in range(table["layers"])]


def _below(prefix: str, table: Flat) -> Mapping[str, Any]:
    """The keys of one kind, under the names that an attention without a pattern has."""
    return {ATTENTION + path.removeprefix(prefix): value for path, value in table.items() if path.startswith(prefix)}


def with_pattern(model: Flat) -> Flat:
    """Returns the keys of a job's model, in which layers that differ are kinds of a pattern."""
    if not any(isinstance(value, PerLayer) for value in model.values()):
        return model
    layers = [{path: value for path, value in own.items() if path.startswith(ATTENTION)} for own in of_layers(model)]
    names = _names(layers)
    table = {path: value for path, value in model.items() if not path.startswith(ATTENTION)}
    # The shortest list that repeats, as a job would give it
    table |= {"attention.type": PATTERN, "attention.layers": period(names)}
    for name, own in dict(zip(names, layers, strict=True)).items():  # each kind once
        table |= {f"attention.kinds.{name}.{path.removeprefix(ATTENTION)}": value for path, value in own.items()}
    return table


def _names(layers: Sequence[Flat]) -> Sequence[str]:
    """A name for the kind of each layer, by what most often differs."""
    named: list[tuple[str, Flat]] = []
    names = []
    for own in layers:
        name = next((name for name, other in named if other == own), "")
        if not name:
            name = _described(own)
            alike = sum(other.rstrip("0123456789") == name for other, _ in named)  # the next of these gets a number
            name = f"{name}{alike + 1}" if alike else name
            named.append((name, own))
        names.append(name)
    return names


def _described(own: Flat) -> str:
    name = "window" if own.get("attention.window") else "full"
    return f"{name}_nope" if own.get("attention.rope.type") == NO_ROPE else name


def outside_kinds(paths: Iterable[str]) -> Iterable[str]:
    """Returns paths of a pattern's keys as they are without one."""
    return (KIND.sub(ATTENTION, path) for path in paths)
