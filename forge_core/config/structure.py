"""From the raw tree to typed components, in one pass that records every problem and continues.

A method for each form of type (section, component, array, …) returns the typed value or raises `Mismatch`; the next
outer table or array notes the problem at the path where it arose, and reads the other entries. Nothing is converted
silently: `"3"` is no int, and 1 is no bool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence, Set
from types import SimpleNamespace
from typing import Any, get_args, get_origin

from attrs import NOTHING, Attribute, define, evolve, field, has

from forge_core.config.field_types import (
    Mismatch,
    choices,
    component_in,
    fits,
    header,
    is_array,
    is_component,
    is_fixed,
    is_mapping,
    is_scalar,
    is_section,
    is_table,
    is_union,
    item_type,
    members,
    read_scalar,
    settled,
    type_name,
    unexpected,
    value_name,
)
from forge_core.config.keys import children, default_of, key_fields, plain_message, resolved_fields, validate
from forge_core.config.tree import Node, Origin, flag, renamed
from forge_core.contracts.components import Component, DefaultType, Unavailable
from forge_core.contracts.deprecation import KEY, ForgeDeprecation
from forge_core.contracts.errors import SURE, JobError, PluginError, Problem, closest, did_you_mean
from forge_core.plugins.catalog import Catalog, UnknownTypeError, install_line

DEEPEST = 32  # tables within tables that defaults may make
INVALID: Any = object()
"""Stands for a value that could not be read; the reason has been noted."""


class Noted(Exception):
    """A value could not be read for reasons that have been noted further in."""


@define
class Findings:
    """Results of one pass in addition to the value."""

    problems: list[Problem] = field(factory=list)
    deprecated: list[ForgeDeprecation] = field(factory=list)
    """Warnings about deprecated keys that differ from their defaults, with their origins."""
    missing: list[str] = field(factory=list)
    """Distributions to install, for types that no installed one offers."""


def structure(root: Node, type_: Any, catalog: Catalog, needed: tuple[str, ...] = ("",)) -> tuple[Any, Findings]:
    """The typed value of a tree, or `INVALID`.

    After a mistake in a key, its default stands in, so that further rules can be checked; do not use such a value. No
    default stands in for a component.
    A component that is neither in nor below the tables `needed`, and cannot be read, is `Unavailable`, and no mistake.
    """
    structurer = _Structurer(root, catalog, needed=needed)
    value = structurer.read(None, structurer.convert, root.plain(), type_)
    structurer.findings.problems += structurer.unknown_keys()
    return value, structurer.findings


def complete_value(value: Any, catalog: Catalog) -> tuple[Any, list[Problem]]:
    """A value made in Python with the components filled in that it names by type only, or `INVALID`."""
    structurer = _Structurer(Node({}, Origin("")), catalog)
    return structurer.read(None, structurer.complete, value), structurer.findings.problems


class _Structurer:
    def __init__(self, root: Node, catalog: Catalog, path: Sequence[str] = (), needed: tuple[str, ...] = ("",)) -> None:
        self.findings = Findings()
        self.tables: dict[str, type] = {}  # class of every table that the job has or could have, by path
        self.unknown: list[tuple[str, str]] = []  # table and name of each key that its table does not have
        self._root = root
        self._catalog = catalog
        self._path = path
        self._needed = needed

    def read(self, key: str | None, convert: Callable[..., Any], *args: Any) -> Any:
        """The result of `convert` below `key` (None: right here), or `INVALID` after noting the problem."""
        outer = self._path
        self._path = outer if key is None else [*outer, key]
        try:
            return convert(*args)
        except Noted:
            return INVALID
        except (Mismatch, PluginError) as error:
            self._note(error)
            return INVALID
        finally:
            self._path = outer

    def convert(self, value: Any, type_: Any, default: str | None = None) -> Any:
        """A raw value as `type_`, else a `Mismatch`; `default` is the component that a table without `type` is."""
        if is_table(type_):
            self._demand_table(value, type_)
        if is_section(type_):
            return self._fields(value, type_)
        if is_component(type_):
            return self._component(value, type_, default)
        if is_array(type_):
            return self._array(value, type_)
        if is_mapping(type_):
            return self._mapping(value, item_type(type_))
        if is_union(type_):
            return self.convert(value, _fitting(value, type_), default)
        if is_scalar(type_):
            return read_scalar(value, type_)
        if type_ is Any or type_ is None:  # None: not annotated
            return value
        raise Mismatch(f"a field of type {type_} cannot be read from TOML; that is a mistake in the component")

    @property
    def _here(self) -> str:
        return ".".join(self._path)

    def _note(self, error: Mismatch | PluginError) -> None:
        fault = error if isinstance(error, Mismatch) else Mismatch(str(error), id="broken-plugin")
        message, origin = str(fault), self._root.innermost(self._here).origin
        if fault.correction is not None:
            message += f"; write {flag(self._here, fault.correction) if origin.is_flag else fault.correction}"
        self.findings.problems.append(Problem(self._here, message, str(origin), None, fault.id, fault.suggestion))

    def _component(self, value: Mapping[str, Any], base: type[Component], default: str | None) -> Any:
        if "type" in value and not self._here.startswith(self._needed):
            return self._if_available(value, base)
        default = default or base.usual_type
        if default is None or "type" in value:
            cls = self.read("type", self._named_class, value, base)
            _demand_valid([cls])  # without its class, nothing is known of the other keys
        else:
            cls = self._load(base, default)
        return self._fields({key: item for key, item in value.items() if key != "type"}, cls)

    def _if_available(self, table: Mapping[str, Any], base: type[Component]) -> Any:
        component, findings = structure(self._root.innermost(self._here), base, self._catalog)
        if not findings.problems:
            return component
        error = JobError([*findings.problems, *install_line(findings.missing)])
        return type("Unavailable", (Unavailable, base), {"table": table, "error": error})()

    def _mapping(self, value: Mapping[str, Any], item: Any) -> dict[str, Any]:
        """Named tables, whose names are the default for `type`; or a table of anything else."""
        named = is_component(item)
        entries = {name: self.read(name, self.convert, v, item, name if named else None) for name, v in value.items()}
        _demand_valid(entries.values())
        return entries

    def _array(self, value: Any, type_: Any) -> Any:
        if isinstance(value, dict) and is_table(item_type(type_)):
            raise Mismatch(f"expected {type_name(type_)}, got a table", self._header("[[{}]]"))
        if not isinstance(value, list):
            raise unexpected(value, type_)
        entry_types = get_args(type_) if is_fixed(type_) else (item_type(type_),) * len(value)
        if len(entry_types) != len(value):
            raise unexpected(value, type_)
        pairs = enumerate(zip(value, entry_types, strict=True))
        items = [self.read(str(index), self.convert, item, of) for index, (item, of) in pairs]
        _demand_valid(items)
        return _collection(type_)(items)

    def _demand_table(self, value: Any, type_: Any) -> None:
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            one, form = ("", "[{}.NAME]") if is_mapping(type_) else ("one ", "[{}]")
            raise Mismatch(f"expected {one}{type_name(type_)}, got an array of tables", self._header(form))
        if not isinstance(value, dict):
            raise unexpected(value, type_)

    def _header(self, form: str) -> str | None:
        """The header of a table in a file; None on the command line, which has no headers."""
        return None if self._root.innermost(self._here).origin.is_flag else form.format(self._here)

    def _named_class(self, table: Mapping[str, Any], base: type[Component]) -> type[Component]:
        if "type" not in table:
            raise Mismatch(f"required key is missing; {self._installed(base)}", id="missing-key")
        if not isinstance(table["type"], str):
            raise Mismatch(f"expected str, got {value_name(table['type'])}; {self._installed(base)}")
        return self._load(base, table["type"])

    def _load(self, base: type[Component], type_: str) -> type[Component]:
        try:
            return self._catalog.load(base.kind, type_, base)
        except UnknownTypeError as error:  # one line, after all problems, installs everything that the job lacks
            self.findings.missing.append(error.distribution)
            raise Mismatch(error.message, id="unknown-type", suggestion=error.likely) from error

    def _installed(self, base: type[Component]) -> str:
        return f"installed: {', '.join(self._catalog.types(base.kind)) or 'none'}"

    def _fields(self, table: Mapping[str, Any], cls: type) -> Any:
        """An instance of an attrs class from its table."""
        fields = resolved_fields(cls)
        self.tables[self._here] = cls
        self.unknown += [(self._here, key) for key in table if key not in fields]
        given = {
            key: self.read(key, self.convert, table[key], f.type, self._default_type(f.default, f.type, cls))
            for key, f in fields.items()
            if key in table
        }
        values = {key: given[key] if key in given else self._default(f, key, cls) for key, f in fields.items()}
        refused = self._refused(given, values, fields)
        self._note_deprecated(given, fields)
        # By another structurer, whose findings are dropped: the user did not ask for these defaults. None stands in for
        # a component: rules would report on one that the job does not name.
        aside = _Structurer(self._root, self._catalog, self._path)
        values |= {key: aside._default(fields[key], key, cls) for key in refused if not is_component(fields[key].type)}
        _demand_valid(values.values())
        try:
            return cls(**{key: value for key, value in values.items() if value is not NOTHING})
        except Exception as error:  # a check of the class as a whole
            if refused:  # it may only be due to the substitutes
                raise Noted from None
            raise Mismatch(plain_message(error)) from error

    def _refused(self, given: dict[str, Any], values: dict[str, Any], fields: dict[str, Attribute]) -> list[str]:
        """Keys whose value could not be read, or that their validator refuses."""
        # Not left to attrs, which stops at the first refusal. A validator may look at other fields and their defaults.
        known = {fields[key].name: v for key, v in values.items() if v is not INVALID and v is not NOTHING}
        instance = SimpleNamespace(**known)
        return [
            key
            for key, value in given.items()
            if value is INVALID or self.read(key, validate, fields[key], value, instance) is INVALID
        ]

    def _note_deprecated(self, given: dict[str, Any], fields: dict[str, Attribute]) -> None:
        for key, value in given.items():
            warning = fields[key].metadata.get(KEY)
            # A resolved job has every key, and would warn of all that are at their defaults.
            if warning is not None and value != default_of(fields[key]):
                path = ".".join([*self._path, key])
                notice = Problem(path, str(warning), str(self._root.innermost(path).origin))
                self.findings.deprecated.append(ForgeDeprecation(str(notice), warning.removed_in))

    # --- defaults ------------------------------------------------------------------------------------------------

    def _default(self, f: Attribute, key: str, cls: type) -> Any:
        """The value of a key that the table leaves out; `NOTHING` if only attrs can compute it."""
        if f.default is NOTHING:
            return self.read(key, self._missing, f.type)
        return self.read(key, self.complete, default_of(f), f.type, cls)

    def _missing(self, type_: Any) -> None:
        if is_section(type_):
            self.tables[self._here] = type_
            required = [key for key, f in resolved_fields(type_).items() if f.default is NOTHING]
            raise Mismatch(
                f"required table is missing; add [{self._here}] with {', '.join(required)}", None, "missing-key"
            )
        base = component_in(type_)
        if base is None:
            raise Mismatch(f"required key is missing; expected {type_name(type_)}", id="missing-key")
        table = header(self._here, type_)
        raise Mismatch(f"required table is missing; add {table} with a type; {self._installed(base)}", id="missing-key")

    def complete(self, value: Any, type_: Any = Any, owner: type | None = None) -> Any:
        """A value with the components filled in that it names by type only. `owner` is the class whose field it is."""
        if isinstance(value, DefaultType):
            return self._component_by_default(value, type_, owner)
        if has(type(value)):
            return self._complete_fields(value)
        if not isinstance(value, Mapping | tuple):
            return settled(value, type_)
        entries = {key: self.read(key, self.complete, item, item_type(type_)) for key, item in children(value)}
        _demand_valid(entries.values())
        return tuple(entries.values()) if isinstance(value, tuple) else entries

    def _complete_fields(self, value: Any) -> Any:
        self.tables[self._here] = type(value)  # also where the job leaves it out: a misplaced key may belong here
        olds, fields = dict(children(value)), resolved_fields(type(value))
        news = {key: self.read(key, self.complete, old, fields[key].type, type(value)) for key, old in olds.items()}
        _demand_valid(news.values())
        # Objects made in Python stay as they are where nothing is filled in.
        changed = {key: new for key, new in news.items() if new is not olds[key] and new != olds[key]}
        return evolve(value, **changed) if changed else value

    def _component_by_default(self, default: DefaultType, type_: Any, owner: type | None) -> Any:
        if len(self._path) > DEEPEST:
            raise Mismatch("the defaults of components nest without end")
        try:
            return self.convert({}, type_, self._default_type(default, type_, owner))
        except (Mismatch, PluginError) as error:
            raise Mismatch(f"is {default.type!r} by default, but {error}") from None

    def _default_type(self, default: Any, type_: Any, owner: type | None) -> str | None:
        """The type of a table that names none, qualified if its own distribution has it: no other can disturb it."""
        base = component_in(type_)
        if base is None or not isinstance(default, DefaultType):
            return None
        if owner is None or not is_component(owner) or "/" in default.type:
            return default.type
        own = f"{self._catalog.type_of(owner).partition('/')[0]}/{default.type}"
        return own if self._catalog.matching(base.kind, own) else default.type

    # --- unknown keys --------------------------------------------------------------------------------------------

    def unknown_keys(self) -> Iterator[Problem]:
        """The problems that unknown keys are: misspelt, misplaced, or left over from another type."""
        # Last, when every table is known: a key may be misplaced, and belong in a table that was read later.
        for table, key in self.unknown:
            path = f"{table}.{key}" if table else key
            node = self._root.innermost(path)
            message = "unknown section" if not table and isinstance(node.value, dict) else "unknown key"
            yield Problem(
                path,
                message + self._hint(table, key, node),
                str(node.origin),
                id="unknown-key",
                suggestion=closest(key, key_fields(self.tables[table]), SURE),
            )

    def _hint(self, table: str, key: str, node: Node) -> str:
        cls, there = self.tables[table], self._root.innermost(table)
        keys = key_fields(cls)
        missing = [each for each, f in keys.items() if f.default is NOTHING and there.child(each) is None]
        return (
            _left_over(table, there.child("type"), node, cls)
            or self._misplaced(table, key)
            or did_you_mean(key, keys, SURE)
            or did_you_mean(key, missing)
            or renamed(key, self._has)
            or did_you_mean(key, keys)
            or self._known_keys(table, cls)
        )

    def _has(self, path: str) -> bool:
        """Whether the job has this key, as far as the types of its tables are known."""
        table, _, key = path.rpartition(".")
        return table not in self.tables or key in key_fields(self.tables[table])

    def _misplaced(self, table: str, key: str) -> str:
        """Another table has a key of just that name."""
        owners = [path for path, cls in self.tables.items() if key in key_fields(cls) and path != table]
        if "" in owners:
            return f"; [{key}] is a separate section"
        if not owners:
            return ""
        close = closest(key, key_fields(self.tables[table]), SURE)
        places = " or ".join(f"[{path}]" for path in owners)
        return f"; did you mean {close!r}, or {key!r} in {places}?" if close else f"; {key!r} belongs in {places}"

    def _known_keys(self, table: str, cls: type) -> str:
        """All keys of the table, and its type, which the table need not name."""
        keys = ", ".join(key_fields(cls)) or "no keys"
        if issubclass(cls, Component):
            return f" of {cls.kind} {self._catalog.type_of(cls)!r}, which has {keys}"
        return f"; [{table}] has {keys}" if table else f"; there are {keys}"


def _demand_valid(values: Iterable[Any]) -> None:
    if any(value is INVALID for value in values):
        raise Noted


def _fitting(value: Any, union: Any) -> Any:
    """The member that is a table for a table, an array for an array, and so on."""
    fitting = [member for member in members(union) if fits(value, member)]
    if not fitting:
        raise unexpected(value, union)
    # A type that lists the value, or its very own, comes before a wider one: 3 is an int in `float | int`.
    return min(fitting, key=lambda member: not choices(member) and type(value) is not member)


def _collection(type_: Any) -> Callable[[list[Any]], Any]:
    origin = get_origin(type_) or type_
    if issubclass(origin, MutableSequence):
        return list
    return frozenset if issubclass(origin, Set) else tuple


def _left_over(table: str, type_: Node | None, key: Node, cls: type) -> str:
    """A later layer changed the table's type, and this key is of the old one."""
    if type_ is None or key.origin.layer >= type_.origin.layer:
        return ""
    old = type_.replaced
    while old is not None and old.value == type_.value:  # layers that repeat the type
        old = old.replaced
    if old is None:
        return ""
    kind = cls.kind if issubclass(cls, Component) else "table"
    return (
        f" (left over from {kind} {old.value!r} in {old.origin}); remove it there, or replace the whole table: "
        + flag(table, f'{{type = "{type_.value}"}}')
    )
