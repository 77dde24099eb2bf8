"""Reading scalars strictly: what Python would convert (`int("3")`, `bool("false")`) is a mistake in a job file."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from forge_core.config.describe import correction, is_array, is_literal, is_table, members, type_name, value_name
from forge_core.contracts.errors import SURE, did_you_mean

SCALARS: Mapping[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,), Path: (str,)}
"""Types of TOML values that each scalar type accepts. A bool is not an int here, though it is in Python."""


class Mismatch(Exception):
    """A value is not what its field expects. `correction` is TOML for what was probably meant."""

    def __init__(self, message: str, correction: str | None = None) -> None:
        super().__init__(message)
        self.correction = correction


def unexpected(value: Any, type_: Any) -> Mismatch:
    """The error for a value that a field of this type does not accept."""
    message = f"expected {type_name(type_)}, got {value_name(value)}"
    if not isinstance(value, str):
        return Mismatch(message, correction(value, type_))
    if value[:1] in ("{", "["):  # an override that is not TOML, and so was taken for a bare string
        return Mismatch(f"{message}, which is not valid TOML; strings inside it need quotes")
    return Mismatch(message + did_you_mean(value, _words(type_), SURE), correction(value, type_))


def _words(type_: Any) -> list[str]:
    """Strings that a type lists as its values."""
    return [choice for member in members(type_) for choice in _choices(member) if isinstance(choice, str)]


def _choices(type_: Any) -> list[Any]:
    if is_enum(type_):
        return [member.value for member in type_]
    return list(typing.get_args(type_)) if is_literal(type_) else []


def is_enum(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, Enum)


def is_scalar(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, tuple(SCALARS))


def read_scalar(value: Any, type_: Any) -> Any:
    """A bool, number, string or path as `type_`.

    Raises:
        Mismatch: it is of another type.
    """
    if is_enum(type_):  # also those that derive from str or int
        return read_choice(value, type_)
    if not _is_scalar(value, type_):
        raise unexpected(value, type_)
    return type_(value)


def read_choice(value: Any, type_: Any) -> Any:
    """A member of a `Literal` or an enumeration.

    Raises:
        Mismatch: the type does not list this value.
    """
    if not _is_choice(value, type_):
        raise unexpected(value, type_)
    return type_(value) if is_enum(type_) else value


def _is_scalar(value: Any, type_: type) -> bool:
    if isinstance(value, bool) or type_ is bool:
        return isinstance(value, bool) and type_ is bool
    return any(isinstance(value, accepted) for base, accepted in SCALARS.items() if issubclass(type_, base))


def _is_choice(value: Any, type_: Any) -> bool:
    return any(value == choice and type(value) is type(choice) for choice in _choices(type_))


def fits(value: Any, type_: Any) -> bool:
    """Whether a value is of a type's shape; what a table or array holds is not looked at."""
    if isinstance(value, dict | list):
        return is_table(type_) if isinstance(value, dict) else is_array(type_)
    if is_literal(type_) or is_enum(type_):
        return _is_choice(value, type_)
    return isinstance(type_, type) and _is_scalar(value, type_)


def distance(value: Any, type_: Any) -> int:
    """Orders types that fit a value: one that lists it, or its very own, comes before a wider one."""
    return 0 if is_literal(type_) or is_enum(type_) or type(value) is type_ else 1
