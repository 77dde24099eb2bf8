"""Keys of `[model.attention]` and `[model.ffn]` that differ between layers.

A job gives such layers as a `pattern` of either, whose kinds have names that mean nothing and whose list may be shorter
than the model. Fields see neither: to them, a key has one value, or a `PerLayer` with one for each layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from forge_plugin_weights.kinds import Flat, Unsupported

PARTS = ("attention", "ffn")
"""Tables whose keys may differ between layers."""
PATTERN = "forge-plugin-transformer/pattern"
NO_ROPE = NO_PART = "forge-plugin-transformer/none"
"""The type of an encoding, or of a part, that is not there."""
KIND = re.compile(r"^(attention|ffn)\.kinds\.[^.]+\.")


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
    patterns = [part for part in PARTS if table.get(f"{part}.type") == PATTERN]
    if not patterns or "layers" not in table:
        return [table]
    prefixes = tuple(f"{part}." for part in patterns)
    shared = {path: value for path, value in table.items() if not path.startswith(prefixes)}
    layers: list[dict[str, Any]] = [dict(shared) for _ in range(table["layers"])]
    for part in patterns:
        names = table[f"{part}.layers"]
        kinds = {name: _below(f"{part}.kinds.{name}.", part, table) for name in names}
        for number in range(len(layers)):
            layers[number] |= kinds[names[number % len(names)]]
    return layers


def _below(prefix: str, part: str, table: Flat) -> Mapping[str, Any]:
    """The keys of one kind, under the names that a part without a pattern has."""
    return {f"{part}.{path.removeprefix(prefix)}": value for path, value in table.items() if path.startswith(prefix)}


def with_pattern(model: Flat) -> Flat:
    """Returns the keys of a job's model, in which layers that differ are kinds of a pattern."""
    for part in PARTS:
        if any(isinstance(value, PerLayer) for path, value in model.items() if path.startswith(f"{part}.")):
            model = _patterned(model, part)
    return model


def _patterned(model: Flat, part: str) -> Flat:
    """Returns the keys with a pattern in the place of a part's keys that differ."""
    prefix = f"{part}."
    layers = [{path: value for path, value in own.items() if path.startswith(prefix)} for own in of_layers(model)]
    names = _names(layers, part)
    table = {path: value for path, value in model.items() if not path.startswith(prefix)}
    # The shortest list that repeats, as a job would give it
    table |= {f"{part}.type": PATTERN, f"{part}.layers": period(names)}
    for name, own in dict(zip(names, layers, strict=True)).items():  # each kind once
        table |= {f"{part}.kinds.{name}.{path.removeprefix(prefix)}": value for path, value in own.items()}
    return table


def _names(layers: Sequence[Flat], part: str) -> Sequence[str]:
    """A name for the kind of each layer, by what most often differs."""
    named: list[tuple[str, Flat]] = []
    names = []
    for own in layers:
        name = next((name for name, other in named if other == own), "")
        if not name:
            name = _described(own, part)
            alike = sum(other.rstrip("0123456789") == name for other, _ in named)  # the next of these gets a number
            name = f"{name}{alike + 1}" if alike else name
            named.append((name, own))
        names.append(name)
    return names


def _described(own: Flat, part: str) -> str:
    type_ = str(own.get(f"{part}.type", "full"))
    if part != "attention" or type_ == NO_PART:
        return type_.rpartition("/")[2]
    mask = str(own.get("attention.mask.type", "causal")).rpartition("/")[2]
    name = mask if mask != "causal" else "window" if own.get("attention.window") else "full"
    return f"{name}_nope" if own.get("attention.rope.type") == NO_ROPE else name


def outside_kinds(paths: Iterable[str]) -> Iterable[str]:
    """Returns paths of a pattern's keys as they are without one."""
    return (KIND.sub(r"\1.", path) for path in paths)
