"""Names of types and values in messages, and the TOML that a value of the wrong type was probably meant to be."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from pathlib import PurePath
from reprlib import Repr
from typing import Any, Literal, TypeGuard

import attrs

from forge_core.contracts.components import Component

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def is_union(type_: Any) -> bool:
    return typing.get_origin(type_) in (typing.Union, types.UnionType)


def is_literal(type_: Any) -> bool:
    return typing.get_origin(type_) is Literal


def is_component(type_: Any) -> TypeGuard[type[Component]]:
    return isinstance(type_, type) and issubclass(type_, Component)


def is_section(type_: Any) -> TypeGuard[type]:
    """An attrs class that is no component: a table without `type`."""
    return isinstance(type_, type) and attrs.has(type_) and not is_component(type_)


def is_array(type_: Any) -> bool:
    origin = typing.get_origin(type_) or type_
    return isinstance(origin, type) and issubclass(origin, Sequence | Set) and not issubclass(origin, str | bytes)


def is_mapping(type_: Any) -> bool:
    origin = typing.get_origin(type_) or type_
    return isinstance(origin, type) and issubclass(origin, Mapping)


def is_table(type_: Any) -> bool:
    return is_component(type_) or is_section(type_) or is_mapping(type_)


def members(type_: Any) -> tuple[Any, ...]:
    """The members of a union without None, or the type itself."""
    options = typing.get_args(type_) if is_union(type_) else (type_,)
    return tuple(member for member in options if member is not type(None))


def item_type(type_: Any) -> Any:
    """Type of the entries of an array or mapping."""
    arguments = [argument for argument in typing.get_args(type_) if argument is not Ellipsis]
    return arguments[-1] if arguments else Any


def component_in(type_: Any) -> type[Component] | None:
    """The component class that a field holds: itself, as entries of an array or mapping, or as a member of a union."""
    for member in members(type_):
        if is_component(member):
            return member
        if (is_array(member) or is_mapping(member)) and component_in(item_type(member)):
            return component_in(item_type(member))
    return None


def section_in(type_: Any) -> type | None:
    """The section class that a field holds: itself, as entries of an array, or as a member of a union."""
    for member in members(type_):
        entry = item_type(member) if is_array(member) else member
        if is_section(entry):
            return entry
    return None


def header(path: str, type_: Any) -> str:
    """The header of a field's table in a job file."""
    return f"[[{path}]]" if any(is_array(member) for member in members(type_)) else f"[{path}]"


def type_name(type_: Any) -> str:
    """The expected type in messages: `int`, `array of str`, `float or scheduler table`."""
    if is_union(type_):
        return " or ".join(type_name(member) for member in members(type_))
    if is_literal(type_):
        return _choices(typing.get_args(type_))
    if is_component(type_):
        return f"{type_.kind} table"
    if is_section(type_):
        return "table"
    if is_mapping(type_):
        return f"named {type_name(item_type(type_))}s" if is_table(item_type(type_)) else "table"
    if is_array(type_):
        return _array_name(type_)
    return _scalar_name(type_)


def _array_name(type_: Any) -> str:
    arguments = typing.get_args(type_)
    if is_fixed(type_):
        return f"array of {len(arguments)} values ({', '.join(type_name(argument) for argument in arguments)})"
    if not arguments:
        return "array"
    return f"array of {type_name(arguments[0])}{'s' if is_table(arguments[0]) else ''}"


def is_fixed(type_: Any) -> bool:
    """A tuple of known length."""
    arguments = typing.get_args(type_)
    return typing.get_origin(type_) is tuple and Ellipsis not in arguments


def _scalar_name(type_: Any) -> str:
    if not isinstance(type_, type):
        return "any value" if type_ is Any else str(type_)
    if issubclass(type_, PurePath):
        return "path"
    if issubclass(type_, Enum):
        return _choices([member.value for member in type_])
    return type_.__name__


def _choices(values: Sequence[Any]) -> str:
    texts = [repr(value) if isinstance(value, str) else toml_text(value) for value in values]
    return texts[0] if len(texts) == 1 else f"one of {', '.join(texts)}"


def value_name(value: Any) -> str:
    """The value in messages: `float 1.5`, `str 'fast'`, `a table`."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        tables = any(isinstance(item, dict) for item in value)
        return "an array of tables" if tables else f"array {_SHORT.repr(value)}"
    if isinstance(value, bool):
        return f"bool {toml_text(value)}"
    return f"{type(value).__name__} {_SHORT.repr(value) if isinstance(value, str) else value}"


def toml_text(value: Any) -> str:
    """A scalar as it is written in TOML."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else str(value)


def correction(value: Any, type_: Any) -> str | None:
    """TOML for what a value of the wrong type was probably meant to be."""
    for member in members(type_):
        text = _correct(value, member)
        if text is not None:
            return text
    return None


def _correct(value: Any, type_: Any) -> str | None:
    if is_array(type_) and not isinstance(value, list | dict):
        return f"[{toml_text(value)}]"
    if is_component(type_) and isinstance(value, str):
        return f"{{type = {toml_text(value)}}}"
    if type_ is str and isinstance(value, bool | int | float):
        return toml_text(toml_text(value))
    if type_ is bool:
        return _as_bool(value)
    if type_ is int or type_ is float:
        return _as_number(value, type_)
    return None


def _as_bool(value: Any) -> str | None:
    return {"true": "true", "false": "false", "1": "true", "0": "false"}.get(str(value).lower())


def _as_number(value: Any, type_: type) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | float):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if type_ is int:
        return str(int(number)) if number.is_integer() else None
    return str(number)
