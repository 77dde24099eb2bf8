"""From the raw tree to typed components, in one pass that notes every problem and goes on.

A reader for each form of type (section, component, array, …) returns the typed value or raises `Mismatch`. The reader
of the next outer table or array catches it, notes the problem at the path where it arose, and reads the other entries.
Nothing is converted silently: `"3"` is no int, and 1 is no bool.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence, Set
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
from attrs import Attribute, define, field, frozen

from forge_core.config.describe import (
    component_in,
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
from forge_core.config.leaves import Mismatch, distance, fits, is_enum, is_scalar, read_choice, read_scalar, unexpected
from forge_core.config.tree import Node, Origin, flag
from forge_core.config.validators import complaint, plain_message
from forge_core.config.walk import default_of, key_fields
from forge_core.contracts.components import Component, DefaultType
from forge_core.contracts.deprecation import ForgeDeprecation, deprecation_of
from forge_core.contracts.errors import PluginError, Problem
from forge_core.plugins.catalog import Catalog, UnknownTypeError

DEEPEST = 32
"""Tables within tables that defaults may make."""

INVALID: Any = object()
"""Stands for a value that could not be read; the reason has been noted."""


class Noted(Exception):
    """A value could not be read for reasons that have been noted further in."""


@frozen
class UnknownKey:
    """A key that its table does not have. Its message waits until all tables are known."""

    table: str
    key: str
    cls: type
    """Class that reads the table."""


@define
class Findings:
    """Results of one pass besides the value."""

    problems: list[Problem] = field(factory=list)
    unknown: list[UnknownKey] = field(factory=list)
    tables: dict[str, type] = field(factory=dict)
    """Class of every table that the job has or could have, by path."""
    deprecated: list[ForgeDeprecation] = field(factory=list)
    """Warnings about deprecated keys that differ from their defaults, with their origins."""
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


def complete_value(value: Any, catalog: Catalog) -> tuple[Any, list[Problem]]:
    """A value made in Python with the components filled in that it names by type only, or `INVALID`."""
    structurer = _Structurer(Node({}, Origin("")), catalog)
    return structurer.read(partial(structurer.complete, value)), structurer.findings.problems


def resolved_fields(cls: type) -> dict[str, Attribute]:
    """Fields that are keys, with their types, of which annotations only have the names.

    Raises:
        Mismatch: a type does not exist at run time.
    """
    try:
        return key_fields(attrs.resolve_types(cls))
    except NameError as error:
        fix = "import the types of fields outside TYPE_CHECKING"
        raise Mismatch(f"the fields of {cls.__qualname__} cannot be read: {error}; {fix}") from error


class _Structurer:
    def __init__(self, root: Node, catalog: Catalog) -> None:
        self.findings = Findings()
        self._root = root
        self._catalog = catalog
        self._path: list[str] = []
        self._readers: Sequence[tuple[Callable[[Any], bool], Callable[[Any, Any], Any]]] = (
            (is_section, self._section),
            (is_component, self._component),
            (is_array, self._array),
            (is_mapping, self._mapping),
            (is_union, self._union),
            (is_literal, read_choice),
            (is_enum, read_choice),
            (is_scalar, read_scalar),
            (lambda type_: type_ is Any or type_ is None, lambda value, _: value),  # None: not annotated
        )

    # --- going through the tree ----------------------------------------------------------------------------------

    def read(self, convert: Callable[[], Any], key: str | None = None) -> Any:
        """The result of `convert` below `key`, or `INVALID` after noting the problem."""
        depth = len(self._path)
        self._path += [] if key is None else [key]
        try:
            return convert()
        except Noted:
            return INVALID
        except Mismatch as mismatch:
            self._note(str(mismatch), mismatch.correction)
            return INVALID
        finally:
            del self._path[depth:]

    def convert(self, value: Any, type_: Any) -> Any:
        """A raw value as `type_`.

        Raises:
            Mismatch: it is not of that type, or no value of TOML can be.
        """
        for applies, reader in self._readers:
            if applies(type_):
                return reader(value, type_)
        raise Mismatch(f"a field of type {type_} cannot be read from TOML; that is a mistake in the component")

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

    def _mapping(self, value: Any, type_: Any) -> dict[str, Any]:
        """Named tables, whose names are the default for `type`; or a table of anything else."""
        self._demand_table(value, type_)
        item = item_type(type_)
        base = item if is_component(item) else None
        entries = {}
        for name, entry in value.items():
            convert = partial(self._component, entry, base, name) if base else partial(self.convert, entry, item)
            entries[name] = self.read(convert, name)
        _demand_valid(entries.values())
        return entries

    def _demand_table(self, value: Any, type_: Any) -> None:
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            one, header = ("", "[{}.NAME]") if is_mapping(type_) else ("one ", "[{}]")
            raise Mismatch(f"expected {one}{type_name(type_)}, got an array of tables", self._header(header))
        if not isinstance(value, dict):
            raise unexpected(value, type_)

    def _header(self, form: str) -> str | None:
        """The header of a table in a file; None on the command line, which has no headers."""
        return None if self._origin().is_flag else form.format(self._here)

    # --- components ----------------------------------------------------------------------------------------------

    def _select(self, value: Mapping[str, Any], base: type[Component], default: str | None) -> type[Component]:
        """The class that the table's `type`, or else the default, names."""
        if "type" not in value and default is not None:
            return self._load(base, default)
        cls = self.read(partial(self._named_class, value, base), "type")
        if cls is INVALID:
            raise Noted
        return cls

    def _named_class(self, value: Mapping[str, Any], base: type[Component]) -> type[Component]:
        if "type" not in value:
            raise Mismatch(f"required key is missing; {self._installed(base)}")
        if not isinstance(value["type"], str):
            raise Mismatch(f"expected str, got {value_name(value['type'])}; {self._installed(base)}")
        return self._load(base, value["type"])

    def _load(self, base: type[Component], type_: str) -> type[Component]:
        try:
            return self._catalog.load(base.kind, type_, base)
        except UnknownTypeError as error:
            self.findings.missing.append(error.distribution)
            raise Mismatch(error.message) from error
        except PluginError as error:
            raise Mismatch(str(error)) from error

    def _installed(self, base: type[Component]) -> str:
        return f"installed: {', '.join(self._catalog.types(base.kind)) or 'none'}"

    # --- keys ----------------------------------------------------------------------------------------------------

    def _fields(self, table: Mapping[str, Any], cls: type) -> Any:
        """An instance of an attrs class from its table."""
        fields = resolved_fields(cls)
        self.findings.tables[self._here] = cls
        self.findings.unknown += [UnknownKey(self._here, key, cls) for key in table if key not in fields]
        given = {key: self.read(self._reader(f, table[key], cls), key) for key, f in fields.items() if key in table}
        values = {key: given[key] if key in given else self._default(f, key, cls) for key, f in fields.items()}
        refused = [key for key in given if self._refused(key, fields, values)]
        self._note_deprecated(given, fields)
        values |= {key: self._substitute(fields[key], key, cls) for key in refused}
        _demand_valid(values.values())
        try:
            return cls(**{key: value for key, value in values.items() if value is not attrs.NOTHING})
        except Exception as error:  # a check of the class as a whole
            if refused:  # it may only be due to the substitutes
                raise Noted from None
            raise Mismatch(plain_message(error)) from error

    def _note_deprecated(self, given: Mapping[str, Any], fields: Mapping[str, Attribute]) -> None:
        """A resolved job has every key: those at their defaults are not worth a word."""
        for key, value in given.items():
            warning = deprecation_of(fields[key], value)
            if warning is not None and value != default_of(fields[key]):
                path = ".".join([*self._path, key])
                notice = Problem(path, str(warning), str(self._root.origin_of(path)))
                self.findings.deprecated.append(ForgeDeprecation(str(notice), warning.removed_in))

    def _reader(self, f: Attribute, value: Any, cls: type) -> Callable[[], Any]:
        base = component_in(f.type)
        if base is not None and isinstance(f.default, DefaultType) and isinstance(value, dict):
            return partial(self._component, value, base, self._own(f.default.type, base, cls))
        return partial(self.convert, value, f.type)

    def _refused(self, key: str, fields: dict[str, Attribute], values: dict[str, Any]) -> bool:
        """Whether a value could not be read, or does not please the field's validator.

        attrs would run the validators only once all values are known, and stop at the first that fails.
        """
        if values[key] is INVALID:
            return True
        accept = partial(_accept, fields[key], values[key], {fields[k].name: v for k, v in values.items()})
        return self.read(accept, key) is INVALID

    # --- defaults ------------------------------------------------------------------------------------------------

    def _default(self, f: Attribute, key: str, cls: type) -> Any:
        """The value of a key that the table leaves out; `NOTHING` if only attrs can compute it."""
        if f.default is attrs.NOTHING:
            return self.read(partial(self._missing, f.type), key)
        return self.read(partial(self.complete, default_of(f), f.type, cls), key)

    def _substitute(self, f: Attribute, key: str, cls: type) -> Any:
        """The default in place of a faulty value, if there is one. Notes no problem."""
        if f.default is attrs.NOTHING:
            return INVALID
        aside = _Structurer(self._root, self._catalog)
        aside._path = [*self._path]
        return aside._default(f, key, cls)

    def _missing(self, type_: Any) -> Any:
        base = component_in(type_)
        if is_section(type_):
            self.findings.tables[self._here] = type_
            required = [key for key, f in resolved_fields(type_).items() if f.default is attrs.NOTHING]
            raise Mismatch(f"required table is missing; add [{self._here}] with {', '.join(required)}")
        if base is None:
            raise Mismatch(f"required key is missing; expected {type_name(type_)}")
        header = f"[[{self._here}]]" if is_array(type_) else f"[{self._here}]"
        raise Mismatch(f"required table is missing; add {header} with a type; {self._installed(base)}")

    def complete(self, value: Any, type_: Any = Any, owner: type | None = None) -> Any:
        """A value with the components filled in that it names by type only. `owner` is the class whose field it is."""
        if isinstance(value, DefaultType):
            return self._component_by_default(value.type, component_in(type_), owner)
        if attrs.has(type(value)):
            return self._complete_fields(value)
        if isinstance(value, Mapping):
            of = item_type(type_)
            entries = {key: self.read(partial(self.complete, item, of), key) for key, item in value.items()}
            _demand_valid(entries.values())
            return entries
        if isinstance(value, tuple):
            items = [self.read(partial(self.complete, item), str(index)) for index, item in enumerate(value)]
            _demand_valid(items)
            return tuple(items)
        return value

    def _component_by_default(self, type_: str, base: type[Component] | None, owner: type | None) -> Any:
        assert base is not None, "only fields that hold a component have such a default"
        if len(self._path) > DEEPEST:
            raise Mismatch("the defaults of components nest without end")
        try:
            return self._component({}, base, self._own(type_, base, owner))
        except Mismatch as mismatch:
            raise Mismatch(f"is {type_!r} by default, but {mismatch}") from None

    def _own(self, type_: str, base: type[Component], owner: type | None) -> str:
        """A default type, qualified if its own distribution offers it: whatever else is installed cannot disturb it."""
        if owner is None or not is_component(owner) or "/" in type_:
            return type_
        qualified = f"{self._catalog.type_of(owner).partition('/')[0]}/{type_}"
        return qualified if any(o.qualified == qualified for o in self._catalog.offers(base.kind)) else type_

    def _complete_fields(self, value: Any) -> Any:
        self.findings.tables[self._here] = type(value)
        changed: dict[str, Any] = {}
        for key, f in resolved_fields(type(value)).items():
            old = getattr(value, f.name)
            new = self.read(partial(self.complete, old, f.type, type(value)), key)
            if new is not old and new != old:  # keep objects made in Python as they are
                changed[key] = new
        _demand_valid(changed.values())
        return attrs.evolve(value, **changed) if changed else value

    # --- arrays and unions ---------------------------------------------------------------------------------------

    def _array(self, value: Any, type_: Any) -> Any:
        if isinstance(value, dict) and is_table(item_type(type_)):
            raise Mismatch(f"expected {type_name(type_)}, got a table", self._header("[[{}]]"))
        if not isinstance(value, list):
            raise unexpected(value, type_)
        types = typing.get_args(type_) if is_fixed(type_) else (item_type(type_),) * len(value)
        if len(types) != len(value):
            raise unexpected(value, type_)
        pairs = enumerate(zip(value, types, strict=True))
        items = [self.read(partial(self.convert, item, of), str(index)) for index, (item, of) in pairs]
        _demand_valid(items)
        return _collection(type_)(items)

    def _union(self, value: Any, type_: Any) -> Any:
        """Tables go to the member that is a table, arrays to the one that is an array, and so on."""
        fitting = [member for member in members(type_) if fits(value, member)]
        if not fitting:
            raise unexpected(value, type_)
        return self.convert(value, min(fitting, key=partial(distance, value)))


def _demand_valid(values: Iterable[Any]) -> None:
    if any(value is INVALID for value in values):
        raise Noted


def _accept(f: Attribute, value: Any, values: dict[str, Any]) -> None:
    """Raise what the field's validator raises. A field with a converter is checked when the class is made."""
    known = {name: other for name, other in values.items() if other is not INVALID and other is not attrs.NOTHING}
    message = None if f.converter else complaint(f.validator, SimpleNamespace(**known), f, value)
    if message is not None:
        raise Mismatch(message)


def _collection(type_: Any) -> Callable[[list[Any]], Any]:
    origin = typing.get_origin(type_) or type_
    if issubclass(origin, MutableSequence):
        return list
    return frozenset if issubclass(origin, Set) else tuple
