"""Hypothesis strategies for the TOML values that a class can be read from, drawn from its fields."""

from __future__ import annotations

import math
import typing
from pathlib import PurePath
from typing import Any

from hypothesis import strategies as st

from forge_core.config.field_types import (
    is_array,
    is_component,
    is_enum,
    is_fixed,
    is_literal,
    is_mapping,
    is_section,
    item_type,
    members,
)
from forge_core.contracts.components import Component
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.documented_keys import Key, keys_of
from forge_plugin_author.schema import keywords

NAMES = st.text(alphabet="abcdef._- é", min_size=1, max_size=6)
DEEP = 3
"""From this depth on, only required keys are drawn."""


def tables(cls: type, catalog: Catalog, depth: int = 0) -> st.SearchStrategy[dict[str, Any]]:
    """Tables that `cls` can be read from, unless a check of its own refuses them."""
    keys = keys_of(cls)
    required = {key.name: values(key, catalog, depth + 1) for key in keys if key.required}
    optional = {key.name: values(key, catalog, depth + 1) for key in keys if not key.required and depth < DEEP}
    return st.fixed_dictionaries(required, optional=optional)


def components(base: type[Component], catalog: Catalog, depth: int = 0) -> st.SearchStrategy[dict[str, Any]]:
    """Tables of any installed component of a kind, with its qualified type."""
    classes = {}
    for offer in catalog.offers(base.kind):
        cls = catalog.load(offer.kind, offer.qualified)
        simple = not any(key.required and any(map(is_component, members(key.type))) for key in keys_of(cls))
        if issubclass(cls, base) and (simple or depth < DEEP):
            classes[offer.qualified] = cls
    if not classes:  # nothing that is installed offers the kind, whose key has other values
        return st.nothing()
    return st.sampled_from(sorted(classes)).flatmap(
        lambda type_: tables(classes[type_], catalog, depth).map(lambda table: {"type": type_, **table})
    )


def values(key: Key, catalog: Catalog, depth: int) -> st.SearchStrategy[Any]:
    limits: dict[str, Any] = {}
    for demand in key.demands:
        limits |= keywords(demand)
    least = 1 if any(demand.text == "not be empty" for demand in key.demands) else 0
    return st.one_of([_of_type(member, catalog, depth, limits, least) for member in members(key.type)])


def _of_type(
    type_: Any, catalog: Catalog, depth: int, limits: dict[str, Any], least: int = 0
) -> st.SearchStrategy[Any]:
    if "enum" in limits:
        return st.sampled_from(limits["enum"])
    if is_component(type_):
        return st.deferred(lambda: components(type_, catalog, depth))
    if is_section(type_):
        return st.deferred(lambda: tables(type_, catalog, depth))
    if is_literal(type_):
        return st.sampled_from(typing.get_args(type_))
    if is_enum(type_):
        return st.sampled_from([member.value for member in type_])
    if is_mapping(type_):
        return st.dictionaries(NAMES, _entry(item_type(type_), catalog, depth), max_size=2)
    if is_fixed(type_):
        return st.tuples(*(_entry(argument, catalog, depth) for argument in typing.get_args(type_))).map(list)
    if is_array(type_):
        return st.lists(_entry(item_type(type_), catalog, depth), min_size=least, max_size=2)
    return _scalar(type_, limits, least)


def _entry(type_: Any, catalog: Catalog, depth: int) -> st.SearchStrategy[Any]:
    return st.one_of([_of_type(member, catalog, depth, {}) for member in members(type_)])


def _scalar(type_: Any, limits: dict[str, Any], least: int) -> st.SearchStrategy[Any]:
    if type_ is bool:
        return st.booleans()
    if type_ is int:
        low, high = limits.get("minimum"), limits.get("maximum", limits.get("exclusiveMaximum", 2**31))
        low = limits["exclusiveMinimum"] + 1 if "exclusiveMinimum" in limits else low
        return st.integers(math.ceil(low) if low is not None else -(2**31), math.floor(high))
    if type_ is float:
        return _floats(limits)
    if "pattern" in limits:
        return st.from_regex(limits["pattern"].replace("$", r"\Z"), fullmatch=True)
    if issubclass(type_, str | PurePath):
        return st.text(alphabet="ab/*. \n\"'\\é", min_size=least, max_size=6)
    return st.nothing()


def _floats(limits: dict[str, Any]) -> st.SearchStrategy[float]:
    low = limits.get("minimum", limits.get("exclusiveMinimum"))
    high = limits.get("maximum", limits.get("exclusiveMaximum"))
    return st.floats(
        low,
        high,
        allow_nan=False,
        exclude_min="exclusiveMinimum" in limits,
        exclude_max="exclusiveMaximum" in limits,
    )
