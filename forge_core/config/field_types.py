"""Types of fields: which forms there are, how messages name them, and strict reading of scalars.

Reading is strict because Python's own conversions (`int("3")`, `bool("false")`) are mistakes in a job file.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from enum import Enum
from os.path import expanduser
from pathlib import Path, PurePath
from reprlib import Repr
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin

import attrs

from forge_core.contracts.components import AnyFloat, Component, FilePath
from forge_core.contracts.errors import SURE, closest, did_you_mean

SCALARS: Mapping[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,), Path: (str,)}
"""Types of TOML values that each scalar type accepts. A bool is not an int here, though it is in Python."""
BOOLS = dict.fromkeys(("true", "1", "yes", "on"), "true") | dict.fromkeys(("false", "0", "no", "off"), "false")
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 60


class Mismatch(Exception):
    """A value is not what its field expects. `correction` is TOML for what was probably meant.

    The `Problem` has its `id` and its `suggestion`, which is the correction by default.
    """

    def __init__(
        self, message: str, correction: str | None = None, id: str = "wrong-value", suggestion: str | None = None
    ) -> None:
        super().__init__(message)
        self.correction = correction
        self.id = id
        self.suggestion = suggestion or correction


def is_union(type_: Any) -> bool:
    """`A | B`, in either spelling."""
    return get_origin(type_) in (Union, types.UnionType)


def is_literal(type_: Any) -> bool:
    """`Literal[…]`."""
    return get_origin(type_) is Literal


def is_enum(type_: Any) -> bool:
    """An enumeration."""
    return isinstance(type_, type) and issubclass(type_, Enum)


def is_scalar(type_: Any) -> bool:
    """A type that `read_scalar` reads."""
    return is_literal(type_) or (isinstance(type_, type) and issubclass(type_, (Enum, *SCALARS)))


def is_component(type_: Any) -> TypeGuard[type[Component]]:
    """A table whose `type` names the class."""
    return isinstance(type_, type) and issubclass(type_, Component)


def is_section(type_: Any) -> TypeGuard[type]:
    """An attrs class that is no component: a table without `type`."""
    return isinstance(type_, type) and attrs.has(type_) and not is_component(type_)


def is_array(type_: Any) -> bool:
    """A sequence or set; texts are none."""
    origin = get_origin(type_) or type_
    return isinstance(origin, type) and issubclass(origin, Sequence | Set) and not issubclass(origin, str | bytes)


def is_fixed(type_: Any) -> bool:
    """A tuple of known length."""
    return get_origin(type_) is tuple and Ellipsis not in get_args(type_)


def is_mapping(type_: Any) -> bool:
    """A table with names of the user's own."""
    origin = get_origin(type_) or type_
    return isinstance(origin, type) and issubclass(origin, Mapping)


def is_table(type_: Any) -> bool:
    """Any type that a table is read as."""
    return is_component(type_) or is_section(type_) or is_mapping(type_)


def members(type_: Any) -> tuple[Any, ...]:
    """The members of a union without None, or the type itself."""
    options = get_args(type_) if is_union(type_) else (type_,)
    return tuple(member for member in options if member is not type(None))


def choices(type_: Any) -> list[Any]:
    """The values that a `Literal` or an enumeration lists; none for any other type."""
    if is_enum(type_):
        return [member.value for member in type_]
    return list(get_args(type_)) if is_literal(type_) else []


def item_type(type_: Any) -> Any:
    """Type of the entries of an array or mapping, or of the member of a union that is one."""
    if is_union(type_):
        return next((item_type(member) for member in members(type_) if is_array(member) or is_mapping(member)), Any)
    arguments = [argument for argument in get_args(type_) if argument is not Ellipsis]
    return arguments[-1] if arguments else Any


def component_in(type_: Any) -> type[Component] | None:
    """The component class that a field holds: itself, as entries of an array or mapping, or as a member of a union."""
    for member in members(type_):
        entry = component_in(item_type(member)) if is_array(member) or is_mapping(member) else member
        if is_component(entry):
            return entry
    return None


# --- names in messages -------------------------------------------------------------------------------------------


def header(path: str, type_: Any) -> str:
    """The header of a field's table in a job file."""
    return f"[[{path}]]" if all(is_array(member) for member in members(type_)) else f"[{path}]"


def type_name(type_: Any) -> str:
    """The expected type in messages: `int`, `array of str`, `float or scheduler table`."""
    if is_union(type_):
        return " or ".join(type_name(member) for member in members(type_))
    if is_component(type_):
        return f"{type_.kind} table"
    if is_mapping(type_) and is_table(item_type(type_)):
        return f"named {type_name(item_type(type_))}s"
    if is_table(type_):
        return "table"
    return _array_name(type_) if is_array(type_) else _scalar_name(type_)


def _array_name(type_: Any) -> str:
    arguments = get_args(type_)
    if is_fixed(type_):
        return f"array of {len(arguments)} values ({', '.join(map(type_name, arguments))})"
    if not arguments:
        return "array"
    return f"array of {type_name(arguments[0])}{'s' if is_table(arguments[0]) else ''}"


def _scalar_name(type_: Any) -> str:
    if listed := [repr(value) if isinstance(value, str) else toml_text(value) for value in choices(type_)]:
        return listed[0] if len(listed) == 1 else f"one of {', '.join(listed)}"
    if not isinstance(type_, type):
        return "any value" if type_ is Any else str(type_)
    return "path" if issubclass(type_, PurePath | FilePath) else type_.__name__


def value_name(value: Any) -> str:
    """The value in messages: `float 1.5`, `str 'fast'`, `a table`."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        tables = any(isinstance(item, dict) for item in value)
        return "an array of tables" if tables else f"array {_SHORT.repr(value)}"
    return f"{type(value).__name__} {_SHORT.repr(value) if isinstance(value, str) else toml_text(value)}"


def toml_text(value: Any) -> str:
    """A value as TOML writes it on one line."""
    if isinstance(value, list | tuple | set | frozenset):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {toml_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, str | PurePath):
        return json.dumps(str(value), ensure_ascii=False)  # TOML supports all escapes of JSON
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- reading scalars ---------------------------------------------------------------------------------------------


def read_scalar(value: Any, type_: Any) -> Any:
    """A bool, number, string or path as `type_`, or a member of a `Literal` or an enumeration; raises `Mismatch`."""
    if not fits(value, type_):
        raise unexpected(value, type_)
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        raise Mismatch(f"integers of TOML have 64 bits: at most {(1 << 63) - 1}, got {_SHORT.repr(value)}")
    return value if is_literal(type_) else settled(type_(value), type_)


def settled(value: Any, type_: Any) -> Any:
    """`value`, of a path without `~`; a `Mismatch` if it is an infinite or NaN float, unless `type_` is `AnyFloat`."""
    if isinstance(value, str | PurePath) and not {FilePath, Path}.isdisjoint(members(type_)):
        return (str if isinstance(value, str) else type(value))(expanduser(value))
    if isinstance(value, float) and not math.isfinite(value) and AnyFloat not in members(type_):
        raise Mismatch(f"must be finite, got {value}")
    return value


def fits(value: Any, type_: Any) -> bool:
    """Whether a value is of a type's shape; what a table or array holds is not looked at."""
    if isinstance(value, dict | list):
        return is_table(type_) if isinstance(value, dict) else is_array(type_)
    if is_literal(type_) or is_enum(type_):  # types too, since True == 1
        return any(value == choice and type(value) is type(choice) for choice in choices(type_))
    base = next((base for base in SCALARS if is_scalar(type_) and issubclass(type_, base)), None)
    return base is not None and isinstance(value, SCALARS[base]) and isinstance(value, bool) == (base is bool)


def unexpected(value: Any, type_: Any) -> Mismatch:
    """The error for a value that a field of this type does not accept."""
    message = f"expected {type_name(type_)}, got {value_name(value)}"
    correction = next(filter(None, (_corrected(value, member) for member in members(type_))), None)
    if not isinstance(value, str):
        return Mismatch(message, correction)
    if value[:1] in ("{", "["):  # an override that is not TOML, and so was taken for a bare string
        return Mismatch(f"{message}, which is not valid TOML; strings inside it need quotes")
    words = [word for member in members(type_) for word in choices(member) if isinstance(word, str)]
    return Mismatch(message + did_you_mean(value, words, SURE), correction, suggestion=closest(value, words, SURE))


def _corrected(value: Any, type_: Any) -> str | None:
    """TOML for what a value of the wrong type was probably meant to be."""
    if is_array(type_) and not isinstance(value, list | dict):
        return f"[{toml_text(value)}]"
    if is_component(type_) and isinstance(value, str):
        return f"{{type = {toml_text(value)}}}"
    if type_ in (str, FilePath) and isinstance(value, bool | int | float):
        return toml_text(toml_text(value))
    if type_ is bool:
        return BOOLS.get(str(value).lower())
    with suppress(ValueError):
        if type_ is float and isinstance(value, str):
            return str(float(value))
        if type_ is int and isinstance(value, str | float) and float(value).is_integer():
            return str(int(float(value)))
    return None
