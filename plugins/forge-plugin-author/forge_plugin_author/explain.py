"""`forge-run explain`: the keys of the job file, from the classes that read them, and errors by their ids."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from attrs import frozen

from forge_core.cli.command_line import with_examples
from forge_core.config import field_types
from forge_core.contracts.components import Command, Component
from forge_core.contracts.errors import ExitCode, JobError, PluginError, closest
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import wrapped
from forge_kit.tools.documented_keys import Key, class_doc, keys_of, one_paragraph
from forge_kit.tools.json_output import add_json, print_json
from forge_plugin_author.error_ids import error_kinds

HEADING = "extend"


def command(argv: list[str]) -> int:
    """Explain a section, component, key or error id.

    The command lists keys with their types, defaults and allowed values. Error ids are in the problems
    of `check --json`; the causes for which runs end, in `runs --json`, are ids too.
    """
    parser = argparse.ArgumentParser("forge-run explain", description=command.__doc__)
    parser.add_argument(
        "path", nargs="?", default="", metavar="PATH", help="`train`, `optimizer.adamw`, `train.steps`, `unknown-key` …"
    )
    add_json(parser)
    examples = ("optimizer.adamw", "train.precision --json", "unknown-key", "hang --json")
    with_examples(parser, *(f"forge-run explain {example}" for example in examples))
    options, catalog = parser.parse_args(argv), Catalog.installed()
    # Before anything is looked up: an id needs no component to be loaded, and a test keeps ids apart from names in jobs
    if error := error_kinds().get(options.path):
        keys = {"path": error.id, "doc": error.meaning, "types": [], "keys": []}
        if options.json:
            print_json({**keys, "fix": error.fix, "page": error.page})
        else:
            print(
                "\n\n".join(
                    [error.id, wrapped(error.meaning), f"{wrapped(f'fix: {error.fix}')}", f"page: {error.page}"]
                )
            )
    elif options.json:
        print_json({**facts(find(options.path, catalog), catalog), "fix": "", "page": ""})
    else:
        print(explain(options.path, catalog))
    return ExitCode.FINISHED


@frozen
class Target:
    """Target of a path: a table of a known class, one key, or a kind whose type is still open."""

    path: str
    table: type | None = None
    kind: type[Component] | None = None
    key: Key | None = None


def find(path: str, catalog: Catalog) -> Target:
    """The target of a path; a `JobError` if nothing is called so."""
    target, rest = Target("", Job), [part for part in path.split(".") if part]
    while rest:
        taken, target = _step(target, rest, catalog)
        rest = rest[taken:]
    return target


def facts(target: Target, catalog: Catalog) -> dict[str, Any]:
    """The same as `explain` as plain types, for JSON; a default is TOML."""
    keys = keys_of(target.table) if target.table is not None else [target.key] if target.key is not None else []
    return {
        "path": target.path,
        "doc": class_doc(target.table) if target.table is not None else "",
        "types": catalog.types(target.kind.kind) if target.kind is not None else [],
        "keys": [_key_facts(key) for key in keys],
    }


def _key_facts(key: Key) -> dict[str, Any]:
    types = {"name": key.name, "type": field_types.type_name(key.type), "choices": field_types.choices(key.type)}
    limits = [demand.text for demand in key.demands if demand.text]
    return {**types, "required": key.required, "default": key.default_text, "must": limits, "doc": key.doc}


def explain(path: str, catalog: Catalog) -> str:
    """The text about `model.transformer.attention.gqa`: sections, types, keys. A `JobError` if nothing is called so."""
    target = find(path, catalog)
    if target.table is not None:
        return _explain_table(target, target.table, catalog)
    key = "\n".join(_key_lines(target.key, catalog)) if target.key is not None else ""
    kind = _explain_kind(target.path, target.kind, catalog) if target.kind is not None else ""
    return "\n\n".join(filter(None, [key, kind]))


def _step(target: Target, rest: list[str], catalog: Catalog) -> tuple[int, Target]:
    """One step along a path: the number of parts taken from `rest`, and the target they lead to."""
    prefix = f"{target.path}." if target.path else ""
    if target.kind is not None:
        type_ = ".".join(rest) if any(":" in part for part in rest) else rest[0]  # a file or dotted path has dots
        if key := _key_of_any_type(target.kind, type_, catalog):
            return 1, _target_of(prefix + type_, key)
        cls = catalog.load(target.kind.kind, type_, target.kind)
        return len(rest) if ":" in type_ else 1, Target(prefix + type_, cls)
    keys = {key.name: key for key in keys_of(target.table)} if target.table is not None else {}
    path = prefix + rest[0]
    if rest[0] in keys:
        return 1, _target_of(path, keys[rest[0]])
    # Kinds that no table of the job is called by, such as `router`; commands stand in no job.
    kinds = [kind for kind in catalog.types("kind") if kind != Command.kind]
    if target.table is Job and rest[0] in kinds:
        return 1, Target(rest[0], kind=catalog.kind_base(rest[0]))
    known = list(dict.fromkeys([*keys, *(kinds if target.table is Job else [])]))
    by_type = {type_: f"{kind}.{type_}" for kind in kinds if target.table is Job for type_ in catalog.types(kind)}
    owners = [kind for kind in kinds if target.table is Job and rest[0] in catalog.types(kind)]
    if len(owners) == 1:  # a type alone, which no other kind has
        return 0, Target(owners[0], kind=catalog.kind_base(owners[0]))
    # A type may have been given without its kind
    likely = closest(rest[0], [*known, *by_type, *error_kinds()])
    hint = f"; did you mean {by_type.get(likely, likely)!r}?" if likely else ""
    hint = f": {' or '.join(f'{kind}.{rest[0]}' for kind in owners)}?" if owners else hint
    hint = hint or f". There is: {', '.join(known) or 'nothing below it'}"
    raise JobError(f"forge-run explain: nothing is called {path!r}{hint}")


def _key_of_any_type(base: type[Component], name: str, catalog: Catalog) -> Key | None:
    """A key that takes a component, found without the type of the table that has it: `model.ffn`."""
    types = catalog.types(base.kind)
    for type_ in types if name not in types and name.isidentifier() else ():
        with suppress(PluginError):  # a type that cannot be loaded does not hide those that can
            for key in keys_of(catalog.load(base.kind, type_, base)):
                if key.name == name and field_types.component_in(key.type):
                    return key
    return None


def _target_of(path: str, key: Key) -> Target:
    base = field_types.component_in(key.type)
    if base is None:
        return Target(path, table=section_in(key.type), key=key)
    either = len(field_types.members(key.type)) > 1  # a value or a component
    return Target(path, kind=base, key=key if either else None)


def _explain_table(target: Target, cls: type, catalog: Catalog) -> str:
    form = field_types.header(target.path, target.key.type) if target.key is not None else "a job"
    title = f"{cls.kind} {catalog.type_of(cls)}" if field_types.is_component(cls) else form
    blocks = ["\n".join(_key_lines(key, catalog)) for key in keys_of(cls)]
    return "\n\n".join([title, class_doc(cls), *(blocks or ["It has no keys."])]).rstrip()


def _key_lines(key: Key, catalog: Catalog) -> Iterator[str]:
    yield f"{key.name}: {field_types.type_name(key.type)}{_conditions(key)}"
    section = section_in(key.type)
    if doc := key.doc or (one_paragraph(class_doc(section)) if section else ""):
        yield wrapped(" ".join(doc.split()), "    ")
    base = field_types.component_in(key.type)
    if base is not None:
        yield wrapped(f"{_form(key)}; installed: {', '.join(catalog.types(base.kind)) or 'none'}", "    ")


def _conditions(key: Key) -> str:
    default = "required" if key.required else f"default {key.default_text}" if key.default_text else "optional"
    limits = [demand.text.replace("be ", "", 1) for demand in key.demands if demand.text]
    return f" ({', '.join([default, *limits])})"


def _form(key: Key) -> str:
    kinds = [member for member in field_types.members(key.type) if field_types.component_in(member)]
    if any(field_types.is_array(member) for member in kinds):
        return f"one table [[…{key.name}]] each"
    named = any(field_types.is_mapping(member) for member in kinds)
    return f"one table [{key.name}.NAME] each, NAME being the default for `type`" if named else "a table"


def _explain_kind(path: str, base: type[Component], catalog: Catalog) -> str:
    types = catalog.types(base.kind)
    lines = [f"{type_}:\n{wrapped(_summary(base, type_, catalog), '    ')}" for type_ in types]
    more = f"forge-run explain {path}.TYPE lists the keys of one." if types else "None is installed."
    head = f"{path} takes a component of kind {base.kind}."
    return "\n\n".join(filter(None, [head, class_doc(base), "\n".join(lines), more]))


def _summary(base: type[Component], type_: str, catalog: Catalog) -> str:
    try:
        return one_paragraph(class_doc(catalog.load(base.kind, type_, base)))
    # A component that cannot be loaded must not hide the others
    except PluginError as error:
        return str(error)


def section_in(type_: Any) -> type | None:
    """The section class that a field holds: itself, as entries of an array, or as a member of a union."""
    members = field_types.members(type_)
    entries = (field_types.item_type(member) if field_types.is_array(member) else member for member in members)
    return next(filter(field_types.is_section, entries), None)
