"""From the raw tree to typed components. One pass that notes every problem and goes on.

cattrs dispatches on the types of fields; the hooks registered here are strict where cattrs converts (`int("3")`,
`bool("false")`), look components up in the catalog, and keep going after a mistake. A hook that cannot give a value
raises `Mismatch`; whoever reads the next outer table or array catches it, notes it at the path where it arose, and
reads the other entries.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Set
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import cattrs
from attrs import Attribute, define, field, frozen
from cattrs.errors import StructureHandlerNotFoundError

from forge_core.components import Component, DefaultType
from forge_core.config.describe import (
    component_in,
    correction,
    is_array,
    is_component,
    is_fixed,
    is_literal,
    is_mapping,
    is_section,
    is_table,
    is_union,
    item_type,
    members,
    type_name,
    value_name,
)
from forge_core.config.suggest import did_you_mean
from forge_core.config.tree import Node, Origin, flag
from forge_core.config.validators import complaint, plain_message
from forge_core.errors import PluginError, Problem
from forge_core.plugins.catalog import Catalog, UnknownTypeError

SCALARS: Mapping[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,), Path: (str,)}
"""What each scalar type accepts; a bool is no int here, though it is in Python."""

DEEPEST = 32
"""Tables within tables that defaults may make."""

INVALID: Any = object()
"""Stands for a value that could not be read; the reason has been noted."""


class Mismatch(Exception):
    """A value is not what its field expects. `correction` is TOML for what was probably meant."""

    def __init__(self, message: str, correction: str | None = None) -> None:
        super().__init__(message)
        self.correction = correction


class Noted(Exception):
    """A value could not be read for reasons that have been noted further in."""


@frozen
class UnknownKey:
    """A key that its table does not have. Its message waits until all tables are known."""

    table: str
    key: str


@define
class Findings:
    """What one pass found out besides the value."""

    problems: list[Problem] = field(factory=list)
    unknown: list[UnknownKey] = field(factory=list)
    tables: dict[str, type] = field(factory=dict)
    """Class of every table that the job has or could have, by path."""
    missing: list[str] = field(factory=list)
    """Distributions to install, for types that no installed one offers."""


def structure(root: Node, type_: Any, catalog: Catalog) -> tuple[Any, Findings]:
    """The typed value of a tree, or `INVALID`.

    After a mistake in a key that has a default, the default stands in for it, so that the value is as complete as can
    be and further rules can be checked; it must not be used otherwise.
    """
    structurer = _Structurer(root, catalog)
    value = structurer.read(partial(structurer.convert, root.plain(), type_))
    return value, structurer.findings


def complete(value: Any, catalog: Catalog) -> tuple[Any, Findings]:
    """A value made in Python with the components filled in that it names by type only, or `INVALID`."""
    structurer = _Structurer(Node({}, Origin("")), catalog)
    return structurer.read(partial(structurer.complete, value)), structurer.findings


class _Structurer:
    def __init__(self, root: Node, catalog: Catalog) -> None:
        self.findings = Findings()
        self._root = root
        self._catalog = catalog
        self._path: list[str] = []
        self._converter = cattrs.Converter(detailed_validation=False)
        for predicate, hook in (
            (is_section, self._section),
            (is_component, self._component),
            (is_array, self._array),
            (is_mapping, self._mapping),
            (is_union, self._union),
            (is_literal, _literal),
            (_is_enum, _enum),
        ):
            self._converter.register_structure_hook_func(predicate, hook)
        for scalar in SCALARS:
            self._converter.register_structure_hook(scalar, _scalar)

    # --- going through the tree ----------------------------------------------------------------------------------

    def read(self, convert: Callable[[], Any], key: str | None = None) -> Any:
        """What `convert` gives below `key`, or `INVALID` after noting why not."""
        self._path += [] if key is None else [key]
        try:
            return convert()
        except Noted:
            return INVALID
        except Mismatch as mismatch:
            self._note(str(mismatch), mismatch.correction)
            return INVALID
        finally:
            del self._path[len(self._path) - (key is not None) :]

    def convert(self, value: Any, type_: Any) -> Any:
        try:
            return self._converter.structure(value, type_)
        except StructureHandlerNotFoundError:
            raise Mismatch(f"a field of type {type_} cannot be read from TOML; that is a mistake in the component") from None

    @property
    def _here(self) -> str:
        return ".".join(self._path)

    def _origin(self) -> Origin:
        return self._root.origin_of(self._here)

    def _note(self, message: str, correction: str | None = None) -> None:
        origin = self._origin()
        if correction is not None:
            message += f"; write {flag(self._here, correction) if origin.is_flag else correction}"
        self.findings.problems.append(Problem(self._here, message, str(origin)))

    # --- tables --------------------------------------------------------------------------------------------------

    def _section(self, value: Any, cls: type) -> Any:
        self._demand_table(value, cls)
        return self._fields(value, cls)

    def _component(self, value: Any, base: type[Component], default: str | None = None) -> Any:
        self._demand_table(value, base)
        cls = self._select(value, base, default)
        return self._fields({key: item for key, item in value.items() if key != "type"}, cls)

    def _demand_table(self, value: Any, type_: Any) -> None:
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            raise Mismatch(f"expected one {type_name(type_)}, got an array of tables", self._header("[]"))
        if not isinstance(value, dict):
            raise Mismatch(f"expected {type_name(type_)}, got {value_name(value)}", correction(value, type_))

    def _header(self, brackets: str) -> str | None:
        """How a table is headed in a file; a flag has no such thing."""
        opening, closing = brackets[: len(brackets) // 2], brackets[len(brackets) // 2 :]
        return None if self._origin().is_flag else f"{opening}{self._here}{closing}"

    def _select(self, value: Mapping[str, Any], base: type[Component], default: str | None) -> type[Component]:
        """The class that the table's `type`, or else the default, names."""
        if "type" in value:
            found = self.read(lambda: self._load(base, self.convert(value["type"], str)), "type")
        elif default is not None:
            found = self._load(base, default)
        else:
            found = self.read(partial(self._missing_type, base), "type")
        if found is INVALID:
            raise Noted
        return found

    def _load(self, base: type[Component], type_: str) -> type[Component]:
        try:
            self._catalog.check_kind(base)
            return self._catalog.load(base.kind, type_, base)
        except UnknownTypeError as error:
            self.findings.missing.append(error.distribution)
            raise Mismatch(str(error)) from error
        except PluginError as error:
            raise Mismatch(str(error)) from error

    def _missing_type(self, base: type[Component]) -> Any:
        raise Mismatch(f"required key is missing; installed: {self._installed(base)}")

    def _installed(self, base: type[Component]) -> str:
        return f"installed: {', '.join(self._catalog.types(base.kind)) or 'none'}"

    def _fields(self, table: Mapping[str, Any], cls: type) -> Any:
        """An instance of an attrs class from its table."""
        fields = {f.alias: f for f in _resolved_fields(cls) if f.init}
        self.findings.tables[self._here] = cls
        self.findings.unknown += [UnknownKey(self._here, key) for key in table if key not in fields]
        given = {key: self.read(self._reader(f, table[key]), key) for key, f in fields.items() if key in table}
        values = {key: given[key] if key in given else self._default(f) for key, f in fields.items()}
        invalid = self._validate(cls, fields, given, values)
        values |= {key: self._substitute(fields[key]) for key in invalid}
        _demand_valid(values.values())
        try:
            return cls(**{key: value for key, value in values.items() if value is not attrs.NOTHING})
        except Exception as error:  # a check of the class as a whole
            if invalid:  # may only be due to the substitutes
                raise Noted from None
            raise Mismatch(plain_message(error)) from error

    def _reader(self, f: Attribute, value: Any) -> Callable[[], Any]:
        if isinstance(f.default, DefaultType) and isinstance(value, dict):
            return partial(self._component, value, component_in(f.type), f.default.type)
        return partial(self.convert, value, f.type)

    def _validate(self, cls: type, fields: dict[str, Attribute], given: dict[str, Any], values: dict[str, Any]) -> list[str]:
        """Keys whose value could not be read or is refused by the field's validator."""
        known = _blank(cls)  # validators may look at other fields
        for key, f in fields.items():
            if values[key] is not INVALID and values[key] is not attrs.NOTHING:
                object.__setattr__(known, f.name, values[key])
        for key, value in given.items():
            if value is not INVALID:
                given[key] = self.read(partial(_accept, known, fields[key], value), key)
        return [key for key, value in given.items() if value is INVALID]

    def _mapping(self, value: Any, type_: Any) -> dict[str, Any]:
        """A table of tables, whose names are the default for `type`; or a table of anything else."""
        self._demand_table(value, type_)
        item = item_type(type_)
        base = item if is_component(item) else None
        entries = {}
        for name, entry in value.items():
            convert = partial(self._component, entry, base, name) if base else partial(self.convert, entry, item)
            entries[name] = self.read(convert, name)
        _demand_valid(entries.values())
        return entries

    # --- defaults ------------------------------------------------------------------------------------------------

    def _default(self, f: Attribute) -> Any:
        if f.default is attrs.NOTHING:
            return self.read(partial(self._missing, f.type), f.alias)
        if isinstance(f.default, attrs.Factory):  # type: ignore[arg-type]
            return attrs.NOTHING if f.default.takes_self else f.default.factory()
        return self.read(partial(self.complete, f.default, f.type), f.alias)

    def _substitute(self, f: Attribute) -> Any:
        """What stands in for a value that is at fault: the default, if there is one."""
        return INVALID if f.default is attrs.NOTHING else self._default(f)

    def complete(self, value: Any, type_: Any = None) -> Any:
        """A default with the components filled in that it names by type only."""
        if isinstance(value, DefaultType):
            return self._component_by_default(value.type, component_in(type_))
        if attrs.has(type(value)):
            return self._complete_fields(value)
        if isinstance(value, Mapping):
            entries = {key: self.read(partial(self.complete, item), key) for key, item in value.items()}
            _demand_valid(entries.values())
            return entries
        if isinstance(value, tuple):
            items = [self.read(partial(self.complete, item), str(index)) for index, item in enumerate(value)]
            _demand_valid(items)
            return tuple(items)
        return value

    def _component_by_default(self, type_: str, base: type[Component] | None) -> Any:
        assert base is not None, "only fields that hold a component have such a default"
        if len(self._path) > DEEPEST:
            raise Mismatch("the defaults of components nest without end")
        try:
            return self._component({}, base, type_)
        except Mismatch as mismatch:
            raise Mismatch(f"is {type_!r} by default, but {mismatch}") from None

    def _complete_fields(self, value: Any) -> Any:
        self.findings.tables[self._here] = type(value)
        changed = {}
        for f in _resolved_fields(type(value)):
            old = getattr(value, f.name, None) if f.init else None
            new = self.read(partial(self.complete, old, f.type), f.alias)
            if new is not old and new != old:  # keep objects made in Python as they are
                changed[f.alias] = new
        _demand_valid(changed.values())
        return attrs.evolve(value, **changed) if changed else value

    def _missing(self, type_: Any) -> Any:
        base = component_in(type_)
        if is_section(type_):
            self.findings.tables[self._here] = type_
            required = [f.alias for f in _resolved_fields(type_) if f.init and f.default is attrs.NOTHING]
            raise Mismatch(f"required table is missing; add [{self._here}] with {', '.join(required)}")
        if base is None:
            raise Mismatch(f"required key is missing; expected {type_name(type_)}")
        header = f"[[{self._here}]]" if is_array(type_) else f"[{self._here}]"
        raise Mismatch(f"required table is missing; add {header} with a type; {self._installed(base)}")

    # --- arrays, unions ------------------------------------------------------------------------------------------

    def _array(self, value: Any, type_: Any) -> Any:
        if isinstance(value, dict) and is_table(item_type(type_)):
            raise Mismatch(f"expected {type_name(type_)}, got a table", self._header("[[]]"))
        if not isinstance(value, list):
            raise Mismatch(f"expected {type_name(type_)}, got {value_name(value)}", correction(value, type_))
        types = typing.get_args(type_) if is_fixed(type_) else (item_type(type_),) * len(value)
        if len(types) != len(value):
            raise Mismatch(f"expected {type_name(type_)}, got {value_name(value)}")
        pairs = enumerate(zip(value, types, strict=True))
        items = [self.read(partial(self.convert, item, of), str(index)) for index, (item, of) in pairs]
        _demand_valid(items)
        return _collection(type_)(items)

    def _union(self, value: Any, type_: Any) -> Any:
        """Tables go to the member that is a table, arrays to the one that is an array, and so on."""
        fitting = sorted((member for member in members(type_) if _fits(value, member)), key=partial(_distance, value))
        if fitting:
            return self.convert(value, fitting[0])
        hint = did_you_mean(value, _text_choices(type_)) if isinstance(value, str) else ""
        raise Mismatch(f"expected {type_name(type_)}, got {value_name(value)}{hint}", correction(value, type_))


def _demand_valid(values: Iterable[Any]) -> None:
    if any(value is INVALID for value in values):
        raise Noted


def _blank(cls: type) -> Any:
    try:
        return object.__new__(cls)
    except TypeError as error:  # abstract
        raise Mismatch(plain_message(error)) from error


def _accept(known: Any, f: Attribute, value: Any) -> Any:
    """The value, if the field's validator accepts it. A field with a converter is checked when the class is made."""
    found = None if f.converter else complaint(f.validator, known, f, value)
    if found is not None:
        raise Mismatch(found)
    return value


def _resolved_fields(cls: type) -> tuple[Attribute, ...]:
    try:
        return attrs.fields(attrs.resolve_types(cls))
    except NameError as error:
        fix = "import the types of fields outside TYPE_CHECKING"
        raise Mismatch(f"the fields of {cls.__qualname__} cannot be read: {error}; {fix}") from error


def _scalar(value: Any, type_: type) -> Any:
    if issubclass(type_, Enum):
        return _enum(value, type_)
    if not _is_scalar(value, type_):
        raise Mismatch(f"expected {type_name(type_)}, got {value_name(value)}", correction(value, type_))
    return type_(value)


def _is_scalar(value: Any, type_: type) -> bool:
    if isinstance(value, bool) or type_ is bool:
        return isinstance(value, bool) and type_ is bool
    return any(isinstance(value, accepted) for base, accepted in SCALARS.items() if issubclass(type_, base))


def _literal(value: Any, type_: Any) -> Any:
    if any(value == choice and type(value) is type(choice) for choice in typing.get_args(type_)):
        return value
    seen = repr(value) if isinstance(value, str) else value_name(value)
    hint = did_you_mean(value, _text_choices(type_)) if isinstance(value, str) else ""
    raise Mismatch(f"expected {type_name(type_)}, got {seen}{hint}", correction(value, str) if hint else None)


def _is_enum(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, Enum)


def _enum(value: Any, type_: type[Enum]) -> Enum:
    try:
        return type_(value)
    except ValueError:
        choices = [str(member.value) for member in type_]
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise Mismatch(f"expected {type_name(type_)}, got {value_name(value)}{hint}") from None


def _collection(type_: Any) -> Callable[[list[Any]], Any]:
    origin = typing.get_origin(type_) or type_
    if issubclass(origin, MutableSequence):
        return list
    return frozenset if issubclass(origin, Set) else tuple


def _fits(value: Any, type_: Any) -> bool:
    """Whether a value is of the member's shape; what it holds is read later."""
    if isinstance(value, dict | list):
        return is_table(type_) if isinstance(value, dict) else is_array(type_)
    if is_literal(type_):
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(type_))
    if _is_enum(type_):
        return value in [member.value for member in type_]
    return isinstance(type_, type) and _is_scalar(value, type_)


def _distance(value: Any, type_: Any) -> int:
    """Orders the members that fit: a listed choice or the very type of the value comes before a wider one."""
    return 0 if is_literal(type_) or _is_enum(type_) or type(value) is type_ else 1


def _text_choices(type_: Any) -> list[str]:
    choices = [choice for member in members(type_) if is_literal(member) for choice in typing.get_args(member)]
    return [choice for choice in choices if isinstance(choice, str)]
