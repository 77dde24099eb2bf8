"""Options of datatrove's steps in a TOML file, checked by the constructors' own signatures.

Each constructor becomes an attrs class with fields of the same names, types and defaults, which the reader of job files
takes: a misspelt option, or one of another type, is reported with the file and line, as a key of a job is.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import GenericAlias
from typing import Any, get_args, get_origin, get_type_hints

import attrs

from forge_core.config.field_types import is_section, is_union
from forge_core.config.structure import structure
from forge_core.config.tree import Node
from forge_core.contracts.errors import Problem
from forge_core.plugins.catalog import Catalog

PLAIN = (bool, int, float, str, tuple, list)
"""Types of defaults that TOML has, too."""
HIDDEN = frozenset({"self", "exclusion_writer", "adapter", "top_k_config", "media", "batch_size"})
"""Parameters that are objects of Python, or that change nothing."""


def read_options(
    node: Node, targets: Sequence[Callable[..., Any]], given: Sequence[str], catalog: Catalog
) -> tuple[tuple[dict[str, Any], ...], list[Problem]]:
    """Read a table as arguments of one or several callables.

    Args:
        node: the table; `type` is not read.
        targets: what takes the arguments, such as a step and its configuration.
        given: parameters that the caller passes, which the table may not have.
        catalog: of components.

    Returns:
        The arguments of each target that the table states, and the problems, with paths relative to the table.
    """
    plain = Node({key: child for key, child in node.value.items() if key != "type"}, node.origin)
    cls = _options_class(tuple(targets), frozenset(given))
    # As a job file is read: every problem of the table, each with its line
    value, findings = structure(plain, cls, catalog)
    if findings.problems:
        return tuple({} for _ in targets), findings.problems
    # What the table leaves out is left to datatrove's own defaults
    stated = {key: _converted(getattr(value, key), child) for key, child in plain.value.items()}
    parameters = [set(_fields(target, frozenset(given))) for target in targets]
    return tuple({key: stated[key] for key in stated if key in names} for names in parameters), []


@cache
def _options_class(targets: tuple[Callable[..., Any], ...], given: frozenset[str]) -> type:
    # Two targets may have a parameter in common, such as the language, which both then take
    fields: dict[str, Any] = {}
    for target in targets:
        fields |= _fields(target, given)
    cls = attrs.make_class("Options", fields, kw_only=True, frozen=True)
    cls.targets = targets  # type: ignore[attr-defined]  # what a table within a table is made of
    return cls


def _fields(target: Callable[..., Any], given: frozenset[str]) -> Mapping[str, Any]:
    """Returns an attrs field for each parameter that a table may have."""
    hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    fields = {}
    for name, parameter in inspect.signature(target).parameters.items():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        type_ = _readable(hints.get(name, type(parameter.default)))
        if variadic or name in HIDDEN or name in given or type_ is None:
            continue
        if parameter.default is parameter.empty:
            fields[name] = attrs.field(type=type_)
        # `None` is a default that annotations often leave out, and a dataclass's `default_factory` has no value here
        elif parameter.default is None or is_section(type_) or not isinstance(parameter.default, PLAIN):
            fields[name] = attrs.field(default=None, type=type_ | None)
        else:
            fields[name] = attrs.field(default=parameter.default, type=type_)
    return fields


def _readable(type_: Any) -> Any:
    """Returns the type as the reader of job files takes it; None for functions and other objects."""
    if is_union(type_):
        members = [member for member in map(_readable, get_args(type_)) if member is not None]
        union: Any = members[0] if members else None
        for member in members[1:]:
            union = union | member
        return union
    origin = get_origin(type_) or type_
    if type_ is collections.abc.Iterable:
        return Sequence[str]
    if dataclasses.is_dataclass(type_) and isinstance(type_, type):
        return _options_class((type_,), frozenset())
    # `tuple[X]` is meant as a tuple of any length where X is a tuple itself (GopherRepetitionFilter)
    if origin is tuple and len(get_args(type_)) == 1:
        return GenericAlias(tuple, (*get_args(type_), ...))
    if isinstance(origin, type) and issubclass(origin, bool | int | float | str | list | tuple):
        return type_
    return type_ if str(origin) == "typing.Literal" else None


def _converted(value: Any, node: Node) -> Any:
    """Returns a value as datatrove takes it: a table as the dataclass that it stands for."""
    if not is_section(type(value)):
        return value
    stated = {key: _converted(getattr(value, key), child) for key, child in node.value.items()}
    return type(value).targets[0](**stated)


def placed(problems: Sequence[Problem], path: str) -> Iterator[Problem]:
    """Yields problems of a table with their paths from the top of the file."""
    for problem in problems:
        yield problem.below(path)
