"""JSON Schemas (2020-12) of what commands print with `--json`, for programs that read it.

The module of a command with `--json` has a function `outputs`, which returns a schema by action: `checkpoints diff`
has the name `diff`, and a command without actions the empty name. Several commands of one module, such as
`data filter` and `data dedup`, have their last words as names.

    def outputs() -> Mapping[str, Schema]:
        return {"": array(keyed(run=TEXT, loss=maybe(NUMBER)))}
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Mapping, Sequence, Set
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import attrs

from forge_core.contracts.errors import JobError, did_you_mean
from forge_core.plugins.catalog import Catalog

Schema = dict[str, Any]

OUTPUTS = "outputs"
"""Name of the function in the module of a command."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
# JSON has no NaN and no infinity: `print_json` writes them as texts
NUMBER: Schema = {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}
SECONDS: Schema = {"type": "number"}
ANYTHING: Schema = {}
INTERVAL: Schema = {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}

SCALARS: Mapping[Any, Schema] = {
    bool: FLAG,
    int: {"type": "integer"},
    float: NUMBER,
    str: TEXT,
    Path: TEXT,
    type(None): {"type": "null"},
    Any: ANYTHING,
}
# Names that annotations of classes use while only a type checker imports them
NAMES: Mapping[str, Any] = {"Mapping": Mapping, "Sequence": Sequence, "Set": Set, "Path": Path, "Any": Any}


# --- what a schema is made of --------------------------------------------------------------------------------------


def keyed(**keys: Schema) -> Schema:
    """An object that has all these keys. Further ones may come with a later version, and are no error."""
    return {"type": "object", "properties": keys, "required": [*keys]}


def with_keys(base: Schema, **optional: Schema) -> Schema:
    """A table that may also have these keys."""
    return {**base, "properties": {**base["properties"], **optional}}


def array(item: Schema) -> Schema:
    """An array of any length."""
    return {"type": "array", "items": item}


def by_name(value: Schema) -> Schema:
    """An object whose keys are names of things, such as paths of a job."""
    return {"type": "object", "additionalProperties": value}


def maybe(schema: Schema) -> Schema:
    """A value, or null where it is not known or does not exist."""
    return one_of(schema, SCALARS[type(None)])


def one_of(*schemas: Schema) -> Schema:
    """A value of any of these forms."""
    return {"anyOf": [*schemas]}


def of(cls: type, **more: Schema) -> Schema:
    """The table that `attrs.asdict` makes of a class: all of its fields, by their types.

    Args:
        cls: an attrs class.
        more: keys that are added to it, or whose type is too general.

    Raises:
        TypeError: a field has a type that JSON has no form for; give its schema in `more`.
    """
    attrs.resolve_types(cls, localns=dict(NAMES))
    return keyed(**{each.name: _of_type(each.type) for each in attrs.fields(cls) if each.name not in more}, **more)


def _of_type(type_: Any) -> Schema:
    origin, arguments = get_origin(type_) or type_, get_args(type_)
    if type_ in SCALARS:
        return SCALARS[type_]
    if origin in (Union, types.UnionType):
        return one_of(*map(_of_type, arguments))
    if origin is Literal:
        return {"enum": [*arguments]}
    if not isinstance(origin, type):
        raise TypeError(f"{type_}: has no form in JSON")
    if issubclass(origin, Enum):
        return {"enum": [member.value for member in origin]}
    if issubclass(origin, Mapping):
        return by_name(_of_type(arguments[1]))
    if issubclass(origin, Sequence | Set):
        return _of_array(origin, arguments)
    if attrs.has(origin):
        return of(origin)
    raise TypeError(f"{type_}: has no form in JSON")


def _of_array(origin: type, arguments: tuple[Any, ...]) -> Schema:
    # tuple[int, str] has so many entries, tuple[int, ...] and others any number
    if issubclass(origin, tuple) and Ellipsis not in arguments:
        size = len(arguments)
        return {"type": "array", "prefixItems": [*map(_of_type, arguments)], "minItems": size, "maxItems": size}
    return array(_of_type(arguments[0]))


# --- of commands ---------------------------------------------------------------------------------------------------


def output_schema(command: str, catalog: Catalog) -> Schema:
    """The schema of what a command prints with `--json`.

    Args:
        command: with its action: `runs`, `inside lens`, `checkpoints diff`.
        catalog: where commands are looked up.

    Raises:
        JobError: there is none of that name; the message has the likely one.
    """
    names = {offer.type: offer for offer in catalog.offers("command")}
    words = command.split()
    for length in range(len(words), 0, -1):
        name, action = " ".join(words[:length]), " ".join(words[length:])
        if name not in names:
            continue
        own = outputs_of(importlib.import_module(names[name].value.partition(":")[0]))
        # Where the module has several commands
        action = action if action or action in own else words[-1]
        if action in own:
            return {"$schema": DIALECT, "title": f"forge-run {command} --json", **own[action]}
        raise JobError(f"forge-run explain schema: there is no schema of {command!r}{_others(name, own)}")
    raise JobError(f"forge-run explain schema: there is no command {command!r}{did_you_mean(command, names)}")


def outputs_of(module: types.ModuleType) -> Mapping[str, Schema]:
    """Returns the schemas of the outputs of a command by action, from its module; none if it prints no JSON."""
    function: Callable[[], Mapping[str, Schema]] = getattr(module, OUTPUTS, dict)
    return function()


def _others(name: str, own: Mapping[str, Schema]) -> str:
    listed = ", ".join(f"{name} {action}".strip() for action in own)
    return f"; there is one of {listed}" if own else f", as {name} has no --json"
