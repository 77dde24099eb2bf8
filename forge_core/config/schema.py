"""JSON Schema (2020-12) of the job file, over the components that are installed."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge_core.config import field_types as types
from forge_core.config.keys import Key, class_doc, keys_of, one_paragraph
from forge_core.config.load import to_toml
from forge_core.contracts.components import Component, DefaultType
from forge_core.contracts.errors import PluginError
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog, Offer

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}
BY_PATH = {"type": "string", "pattern": ":"}
"""A `type` that names a local file or a module: nothing is known of its keys."""

Schema = dict[str, Any]


def job_schema(catalog: Catalog) -> tuple[Schema, list[str]]:
    """The schema, and why components were left out of it (one that cannot be loaded)."""
    writer = _Writer(catalog)
    root = {"$schema": DIALECT, "title": "Forge job", **writer.section(Job)}
    return root | {"$defs": dict(sorted(writer.definitions.items()))}, [*writer.left_out]


class _Writer:
    def __init__(self, catalog: Catalog) -> None:
        self.definitions: dict[str, Schema] = {}
        self.left_out: dict[str, None] = {}
        self._catalog = catalog
        self._loaded: dict[type, dict[str, tuple[str, type[Component]]]] = {}

    def section(self, cls: type, **more: Schema) -> Schema:
        """A table with the keys of a class, these more, and no others.

        Raises:
            PluginError: the types of its fields cannot be resolved.
        """
        keys = keys_of(cls)
        return {
            "type": "object",
            "description": one_paragraph(class_doc(cls)),
            "properties": more | {key.name: self._key(key) for key in keys},
            "required": [key.name for key in keys if key.required],
            "additionalProperties": False,
        }

    def _key(self, key: Key) -> Schema:
        schema = dict(self.value(key.type, key.default.type if isinstance(key.default, DefaultType) else None))
        for demand in key.demands:
            schema |= demand.schema
        if key.doc:
            schema["description"] = " ".join(key.doc.split())
        if not key.required and key.default is not None and not isinstance(key.default, DefaultType):
            default = to_toml(key.default, self._catalog)
            if not isinstance(default, float) or math.isfinite(default):  # JSON has no infinity
                schema["default"] = default
        return schema

    def value(self, type_: Any, default: str | None = None) -> Schema:
        """The schema of a field's type. `default` is the component that a table without `type` is."""
        if types.is_union(type_):
            options = [self.value(member, default) for member in types.members(type_)]
            return options[0] if len(options) == 1 else {"anyOf": options}
        if types.is_component(type_):
            return self._component(type_, default)
        if types.is_section(type_):
            return self._shared(f"{type_.__module__}.{type_.__qualname__}", lambda: self.section(type_))
        if types.is_mapping(type_):
            return self._mapping(types.item_type(type_))
        # Before arrays in general: a tuple of known length is one too.
        if types.is_fixed(type_):
            items = [self.value(argument) for argument in typing.get_args(type_)]
            return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
        if types.is_array(type_):
            return {"type": "array", "items": self.value(types.item_type(type_))}
        if listed := types.choices(type_):
            return {"enum": listed}
        return {"type": SCALARS[type_]} if type_ in SCALARS else {}

    def _mapping(self, item: Any) -> Schema:
        """Named tables: a name that is an installed type needs no `type` of its own."""
        if not types.is_component(item):
            return {"type": "object", "additionalProperties": self.value(item)}
        named = {type_: self._component(item, type_) for type_ in self._catalog.types(item.kind)}
        return {"type": "object", "properties": named, "additionalProperties": self._component(item)}

    # --- components ----------------------------------------------------------------------------------------------

    def _component(self, base: type[Component], default: str | None = None) -> Schema:
        named = self._shared(base.__name__, lambda: self._by_type(base))
        offer = self._offers(base).get(default or "")
        if offer is None:
            return named
        return {"if": {"required": ["type"]}, "then": named, "else": self._table(*offer)}

    def _by_type(self, base: type[Component]) -> Schema:
        """A table whose `type` decides on the other keys."""
        tables: dict[str, tuple[Schema, list[str]]] = {}
        for spelling, (name, cls) in self._offers(base).items():
            tables.setdefault(name, (self._table(name, cls), []))[1].append(spelling)
        spellings = [spelling for _, names in tables.values() for spelling in names]
        schema = {
            "type": "object",
            "description": one_paragraph(class_doc(base)),
            "properties": {"type": {"anyOf": [{"enum": spellings}, BY_PATH]} if spellings else BY_PATH},
            "required": ["type"],
        }
        cases = [
            {"if": {"properties": {"type": {"enum": names}}, "required": ["type"]}, "then": table}
            for table, names in tables.values()
        ]
        return {**schema, "allOf": cases} if cases else schema  # an empty `allOf` is not allowed

    def _table(self, name: str, cls: type[Component]) -> Schema:
        key = f"{cls.kind}.{name.replace('/', ':')}"  # a slash would be a step in a reference
        return self._shared(key, lambda: self.section(cls, type={"type": "string"}))

    def _offers(self, base: type[Component]) -> dict[str, tuple[str, type[Component]]]:
        """Every unambiguous spelling of an installed type, with its qualified name and its class."""
        if base not in self._loaded:
            self._loaded[base] = {}
            offers = self._catalog.offers(base.kind)
            for offer in offers:
                cls = self._load(offer)
                if cls is not None and issubclass(cls, base):
                    unique = [other.type for other in offers].count(offer.type) == 1
                    spellings = [offer.qualified, offer.type] if unique else [offer.qualified]
                    self._loaded[base] |= dict.fromkeys(spellings, (offer.qualified, cls))
        return self._loaded[base]

    def _load(self, offer: Offer) -> type[Component] | None:
        try:
            cls = self._catalog.load(offer.kind, offer.qualified)
            keys_of(cls)
        except PluginError as error:  # an editor that knows the other components is better than none
            self.left_out[str(error)] = None
            return None
        return cls

    def _shared(self, name: str, write: Callable[[], Schema]) -> Schema:
        """A reference to a definition, which is written on its first use."""
        if name not in self.definitions:
            self.definitions[name] = {}  # before it is written: it may refer to itself
            self.definitions[name] = write()
        return {"$ref": f"#/$defs/{name}"}
