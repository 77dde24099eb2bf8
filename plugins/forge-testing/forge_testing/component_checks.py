"""Check component classes against the contracts of their kinds. Needs no torch."""

from __future__ import annotations

import difflib
import inspect
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any

import attrs
import tomli_w
from attrs import Attribute

from forge_core.config.field_types import is_component, is_literal, is_union, members
from forge_core.config.keys import resolved_fields
from forge_core.config.load import to_toml
from forge_core.contracts.components import Component, Plugin, TrainingHook, call_refusal
from forge_core.contracts.errors import PluginError
from forge_core.plugins.catalog import Catalog, Offer
from forge_core.plugins.manager import Plugins
from forge_kit.tools.documented_keys import field_docs
from forge_testing.tables import read_value


def component_problems(
    cls: type[Component], base: type[Component], offer: Offer, catalog: Catalog, sample: Mapping[str, Any] | None
) -> Iterator[str]:
    """Yield every problem of a component class, each with its fix.

    Args:
        cls: The class.
        base: Base class of its kind.
        offer: Entry point that names the class.
        catalog: Catalog in which the components of its keys are looked up.
        sample: Keys with which it can be created. None if they are not known: failing to create it is then no problem.
    """
    if not (vars(cls).get("__doc__") or "").strip():
        yield "the class has no docstring, which `forge-run explain` shows; say what it does, with its source"
    yield from method_problems(cls, base)
    before = "torch" in sys.modules
    try:
        fields = resolved_fields(cls)
    except PluginError as error:
        yield str(error)
        return
    if "torch" in sys.modules and not before:
        yield "the types of its keys import torch; give keys types of TOML, and make torch's of them in `build`"
    yield from field_problems(cls, fields)
    component = None
    try:
        component = read_value({"type": offer.qualified, **_with_required(fields, sample or {})}, base, catalog)
    except ValueError as error:
        if sample is not None:
            yield f'it cannot be made for a trial: {error}; give samples={{"{offer.type}": {{…}}}} with keys that work'
    if component is not None:
        yield from instance_problems(component, base, offer, catalog)


def field_problems(cls: type[Component], fields: Mapping[str, Attribute]) -> Iterator[str]:
    """Yield the problems of its keys."""
    docs = field_docs(cls)
    for key, field in fields.items():
        if field.type is None:
            yield f"{key}: has no type; annotate it, as in `{key}: float = 1.0`"
            continue
        if not field.kw_only:
            yield f"{key}: is positional; decorate the class with @frozen(kw_only=True)"
        if field.name not in docs:
            yield f"{key}: has no documentation; put a string under the field: meaning, unit, what 0 or None stand for"
        if is_union(field.type) and type(None) in _arguments(field.type) and field.default is not None:
            yield f"{key}: may be None, which TOML cannot say, so None must be its default"


def method_problems(cls: type[Component], base: type[Component]) -> Iterator[str]:
    """Yield the problems of its methods."""
    asked_for = dict(inspect.getmembers(base, inspect.isfunction))
    for name, asked in asked_for.items():
        own = getattr(cls, name)
        if name.startswith("_"):
            continue
        if own is asked and "NotImplementedError" in asked.__code__.co_names:  # the base leaves it to others
            # Or what calls it is replaced instead: an evaluation that has its own `build` needs no `evaluate`.
            callers = [other for other, function in asked_for.items() if name in function.__code__.co_names]
            if any(getattr(cls, other) is not asked_for[other] for other in callers):
                continue
            parameters = ", ".join(inspect.signature(asked).parameters)
            yield f"it does not implement {name}({parameters}), which {base.__name__} requires"
        elif inspect.isfunction(own) and own is not asked and (refusal := call_refusal(own, asked)):
            yield refusal
    if issubclass(cls, TrainingHook):
        events = [name for name in dir(TrainingHook) if name.startswith("on_")]
        for name in dir(cls):
            if name.startswith("on_") and name not in events:
                close = difflib.get_close_matches(name, events, n=1)
                yield f"there is no event {name}, so it is never called{f'; did you mean {close[0]}?' if close else ''}"


def instance_problems(component: Any, base: type[Component], offer: Offer, catalog: Catalog) -> Iterator[str]:
    """Yield the problems of an instance: round trip through TOML, and hooks."""
    try:
        text = tomli_w.dumps({"value": to_toml(component, catalog)})
        again = read_value(tomllib.loads(text)["value"], base, catalog)
    except (TypeError, ValueError) as error:
        yield f"written to TOML, it cannot be read back: {error}; use types that TOML has, tuples, and components"
    else:
        differ = [] if again == component else _differing(component, again)
        if differ:
            pairs = "; ".join(f"{key}: {before!r} became {after!r}" for key, before, after in differ)
            yield f"written to TOML and read back, it is not equal: {pairs}; see that converters keep their own results"
    if isinstance(component, Plugin):
        try:
            Plugins({offer.type: component, **specifying_plugins(offer, catalog)}, catalog)
        except PluginError as error:
            yield str(error)


def specifying_plugins(offer: Offer, catalog: Catalog) -> dict[str, Plugin]:
    """Return the other installed plugins that declare hook specifications, which the offered plugin may implement."""
    plugins: dict[str, Plugin] = {}
    for other in catalog.offers("plugin"):
        with suppress(PluginError, ValueError):  # a broken one is reported by the check of its distribution
            cls = catalog.load("plugin", other.qualified)
            if other != offer and hasattr(cls, "forge_add_hookspecs"):
                table = {"type": other.qualified, **_with_required(resolved_fields(cls), {})}
                plugin = read_value(table, Plugin, catalog)
                Plugins({other.qualified: plugin}, catalog)
                plugins[other.qualified] = plugin
    return plugins


def _with_required(fields: Mapping[str, Attribute], sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sample, completed by a value of the right type for each required key that it lacks."""
    table = dict(sample)
    for key, field in fields.items():
        if field.default is attrs.NOTHING and key not in table and field.type is not None:
            value = _some_value(members(field.type)[0])
            table |= {} if value is None else {key: value}
    return table


def _some_value(type_: Any) -> Any:
    """Return a value of a simple type; None for other types."""
    if is_literal(type_):
        return _arguments(type_)[0]
    if is_component(type_) or not isinstance(type_, type):
        return None
    if issubclass(type_, PurePath | str):
        return "x"
    return {bool: True, int: 2, float: 1.0}.get(type_)


def _arguments(type_: Any) -> tuple[Any, ...]:
    return getattr(type_, "__args__", ())


def _differing(one: Any, other: Any) -> list[tuple[str, Any, Any]]:
    if type(one) is not type(other):
        return [("type", type(one).__name__, type(other).__name__)]
    pairs = [(f.name, getattr(one, f.name), getattr(other, f.name)) for f in attrs.fields(type(one))]
    return [(name, before, after) for name, before, after in pairs if before != after]
