"""`forge-run explain`: the keys of the job file, from the classes that read them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import suppress

from attrs import frozen

from forge_core.cli.tables import wrapped
from forge_core.config.describe import (
    component_in,
    header,
    is_array,
    is_component,
    is_mapping,
    members,
    section_in,
    type_name,
)
from forge_core.config.docs import class_doc, one_paragraph
from forge_core.config.job import Job
from forge_core.config.keys import Key, keys_of
from forge_core.contracts.components import Command, Component
from forge_core.contracts.errors import ExitCode, JobError, PluginError, did_you_mean
from forge_core.plugins.catalog import Catalog


def command(argv: list[str]) -> int:
    """Tell what a section, a component or a key is for: keys, types, defaults, allowed values."""
    parser = argparse.ArgumentParser("forge-run explain", description=command.__doc__)
    parser.add_argument("path", nargs="?", default="", help="`train`, `optimizer`, `optimizer.adamw`, `train.steps` …")
    print(explain(parser.parse_args(argv).path, Catalog.installed()))
    return ExitCode.FINISHED


@frozen
class Place:
    """Where a path leads: a table of a known class (perhaps that of a key), one key, or a kind whose type is still open
    (perhaps of a key)."""

    path: str
    table: type | None = None
    kind: type[Component] | None = None
    key: Key | None = None


def explain(path: str, catalog: Catalog) -> str:
    """The text about a path.

    Raises:
        JobError: there is nothing of that name.
    """
    place = find(path, catalog)
    if place.table is not None:
        return _explain_table(place, place.table, catalog)
    key = "\n".join(_key_lines(place.key, catalog)) if place.key is not None else ""
    kind = _explain_kind(place.path, place.kind, catalog) if place.kind is not None else ""
    return "\n\n".join(filter(None, [key, kind]))


# --- finding -----------------------------------------------------------------------------------------------------


def find(path: str, catalog: Catalog) -> Place:
    """Follow a path through sections, types and keys: `model.transformer.attention.gqa`.

    Raises:
        JobError: it leads nowhere; names what there is at that point.
    """
    place = Place("", Job)
    rest = [part for part in path.split(".") if part]
    while rest:
        taken, place = _step(place, rest, catalog)
        rest = rest[taken:]
    return place


def _step(place: Place, rest: list[str], catalog: Catalog) -> tuple[int, Place]:
    """One step along a path; gives how many of its parts were used."""
    if place.kind is not None:
        type_ = ".".join(rest) if any(":" in part for part in rest) else rest[0]  # a file or dotted path has dots
        taken = len(rest) if ":" in type_ else 1
        if key := _key_of_any_type(place, type_, catalog):
            return 1, _place_of(_join(place.path, type_), key)
        return taken, Place(_join(place.path, type_), catalog.load(place.kind.kind, type_, place.kind))
    keys = {key.name: key for key in keys_of(place.table)} if place.table is not None else {}
    path = _join(place.path, rest[0])
    if rest[0] in keys:
        return 1, _place_of(path, keys[rest[0]])
    kinds = [kind for kind in catalog.kinds() if kind != Command.kind]  # which stands in no job
    if place.table is Job and rest[0] in kinds:
        return 1, Place(rest[0], kind=catalog.kind_base(rest[0]))
    known = [*keys, *(kinds if place.table is Job else [])]
    hint = did_you_mean(rest[0], known) or f". There is: {', '.join(known) or 'nothing below it'}"
    raise JobError(f"forge-run explain: nothing is called {path!r}{hint}")


def _key_of_any_type(place: Place, name: str, catalog: Catalog) -> Key | None:
    """A key that takes a component, found without the type of the table that has it: `model.ffn`."""
    assert place.kind is not None
    types = catalog.types(place.kind.kind)
    for type_ in types if name not in types and name.isidentifier() else ():
        with suppress(PluginError):
            for key in keys_of(catalog.load(place.kind.kind, type_, place.kind)):
                if key.name == name and component_in(key.type):
                    return key
    return None


def _place_of(path: str, key: Key) -> Place:
    base = component_in(key.type)
    if base is not None:
        return Place(path, kind=base, key=key if len(members(key.type)) > 1 else None)
    section = section_in(key.type)
    return Place(path, table=section, key=key) if section is not None else Place(path, key=key)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# --- telling -----------------------------------------------------------------------------------------------------


def _explain_table(place: Place, cls: type, catalog: Catalog) -> str:
    form = header(place.path, place.key.type) if place.key is not None else "a job"
    title = f"{cls.kind} {catalog.type_of(cls)}" if is_component(cls) else form
    blocks = ["\n".join(_key_lines(key, catalog)) for key in keys_of(cls)]
    return "\n\n".join([title, class_doc(cls), *(blocks or ["It has no keys."])]).rstrip()


def _key_lines(key: Key, catalog: Catalog) -> Iterator[str]:
    yield f"{key.name}: {type_name(key.type)}{_conditions(key)}"
    section = section_in(key.type)
    doc = key.doc or (one_paragraph(class_doc(section)) if section else "")
    if doc:
        yield wrapped(" ".join(doc.split()), "    ")
    base = component_in(key.type)
    if base is not None:
        yield wrapped(f"{_form(key)}; installed: {', '.join(catalog.types(base.kind)) or 'none'}", "    ")


def _conditions(key: Key) -> str:
    default = "required" if key.required else f"default {key.default_text}" if key.default_text else "optional"
    limits = [demand.text.replace("be ", "", 1) for demand in key.demands if demand.text]
    return f" ({', '.join([default, *limits])})"


def _form(key: Key) -> str:
    kinds = [member for member in members(key.type) if component_in(member)]
    if any(is_array(member) for member in kinds):
        return f"one table [[…{key.name}]] each"
    named = any(is_mapping(member) for member in kinds)
    return f"one table [{key.name}.NAME] each, NAME being the default for `type`" if named else "a table"


def _explain_kind(path: str, base: type[Component], catalog: Catalog) -> str:
    types = catalog.types(base.kind)
    told = [f"{type_}:\n{wrapped(_summary(base, type_, catalog), '    ')}" for type_ in types]
    more = f"forge-run explain {path}.TYPE tells the keys of one." if types else "None is installed."
    head = f"{path} takes a component of kind {base.kind}."
    return "\n\n".join(filter(None, [head, class_doc(base), "\n".join(told), more]))


def _summary(base: type[Component], type_: str, catalog: Catalog) -> str:
    try:
        return one_paragraph(class_doc(catalog.load(base.kind, type_, base)))
    except PluginError as error:
        return str(error)
