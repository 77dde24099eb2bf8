"""`forge-run explain schema`: a JSON Schema (2020-12) of the job file, for editors, or of what a command prints."""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge_core.cli.command_line import with_examples
from forge_core.config import field_types as types
from forge_core.config.keys import Demand
from forge_core.config.load import to_toml
from forge_core.contracts.components import Component, DefaultType, FilePath
from forge_core.contracts.errors import ExitCode, PluginError
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.documented_keys import Key, class_doc, keys_of, one_paragraph
from forge_kit.tools.json_output import print_json
from forge_kit.tools.output_schema import DIALECT, Schema, output_schema

SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string", FilePath: "string"}
BOUNDS = {">": "exclusiveMinimum", ">=": "minimum", "<": "exclusiveMaximum", "<=": "maximum"}
BY_PATH = {"type": "string", "pattern": ":"}
"""A `type` that names a local file or a module: nothing is known of its keys."""

HEADING = "extend"


def command(argv: list[str]) -> int:
    """Print a JSON Schema of the job file, for editors.

    Editors use it for completion and checks. With a command, the schema is of its output with --json.
    """
    parser = argparse.ArgumentParser("forge-run explain schema", description=command.__doc__)
    outputs = "a command with --json, for the schema of what it prints (the job file)"
    parser.add_argument("command", nargs="*", metavar="NAME", help=outputs)
    with_examples(
        parser,
        "forge-run explain schema > forge.schema.json",
        "forge-run explain schema inside lens",
        "forge-run explain schema checkpoints diff",
    )
    options = parser.parse_args(argv)
    catalog = Catalog.installed()
    if options.command:
        print_json(output_schema(" ".join(options.command), catalog))
        return ExitCode.FINISHED
    schema, left_out = job_schema(catalog)
    print(json.dumps(schema, indent=2, ensure_ascii=False))
    # Apart from the schema, so that standard output can go into a file.
    for message in left_out:
        print(f"left out: {message}", file=sys.stderr)
    return ExitCode.FINISHED


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
        self._offers: Any = functools.cache(self._load_offers)  # to mypy, classes are not hashable
        self._keys_of: Any = functools.cache(keys_of)

    def section(self, cls: type, **more: Schema) -> Schema:
        """A table with the keys of a class, these more, and no others; raises as `keys_of`."""
        keys = self._keys_of(cls)
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
            schema |= keywords(demand)
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
        """Named tables: a table whose name is an installed type needs no `type` key."""
        if not types.is_component(item):
            return {"type": "object", "additionalProperties": self.value(item)}
        named = {type_: self._component(item, type_) for type_ in self._catalog.types(item.kind)}
        return {"type": "object", "properties": named, "additionalProperties": self._component(item)}

    def _component(self, base: type[Component], default: str | None = None) -> Schema:
        named = self._shared(base.__name__, lambda: self._by_type(base))
        for spellings, cls in self._offers(base):
            if (default or base.usual_type) in spellings:
                # Without `type`, the keys are checked as keys of the usual component
                return {"if": {"required": ["type"]}, "then": named, "else": self._table(spellings[0], cls)}
        return named

    def _by_type(self, base: type[Component]) -> Schema:
        """A table whose `type` decides on the other keys."""
        offers = self._offers(base)
        spellings = [spelling for names, _ in offers for spelling in names]
        schema = {
            "type": "object",
            "description": one_paragraph(class_doc(base)),
            "properties": {"type": {"anyOf": [{"enum": spellings}, BY_PATH]} if spellings else BY_PATH},
            "required": ["type"],
        }
        cases = [
            {"if": {"properties": {"type": {"enum": names}}, "required": ["type"]}, "then": self._table(names[0], cls)}
            for names, cls in offers
        ]
        return {**schema, "allOf": cases} if cases else schema  # an empty `allOf` is not allowed

    def _table(self, name: str, cls: type[Component]) -> Schema:
        key = f"{cls.kind}.{name.replace('/', ':')}"  # a slash would be a step in a reference
        return self._shared(key, lambda: self.section(cls, type={"type": "string"}))

    def _load_offers(self, base: type[Component]) -> list[tuple[list[str], type[Component]]]:
        """Every unambiguous spelling of each installed type, the qualified one first, and its class."""
        loaded = []
        offers = self._catalog.offers(base.kind)
        for offer in offers:
            try:
                cls = self._catalog.load(offer.kind, offer.qualified)
                # Called for its errors, which leave out this component alone
                self._keys_of(cls)
            except PluginError as error:  # a schema of the other components is better than none
                self.left_out[str(error)] = None
                continue
            unique = [other.type for other in offers].count(offer.type) == 1
            if issubclass(cls, base):
                loaded.append(([offer.qualified, offer.type] if unique else [offer.qualified], cls))
        return loaded

    def _shared(self, name: str, write: Callable[[], Schema]) -> Schema:
        """A reference to a definition, which is written on its first use."""
        if name not in self.definitions:
            self.definitions[name] = {}  # before it is written: it may refer to itself
            self.definitions[name] = write()
        return {"$ref": f"#/$defs/{name}"}


def keywords(demand: Demand) -> Schema:
    """Returns the JSON Schema keywords that express a validator's condition, if there are any."""
    validator: Any = demand.check
    # By attributes, since the classes of attrs' validators are private
    if hasattr(validator, "compare_op"):
        return {BOUNDS[validator.compare_op]: validator.bound}
    if hasattr(validator, "options"):
        return {"enum": list(validator.options)}
    return {"pattern": f"^(?:{validator.pattern.pattern})$"} if hasattr(validator, "pattern") else {}
