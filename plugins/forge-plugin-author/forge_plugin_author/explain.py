"""`forge-run explain`: the keys of the job file, from the classes that read them, and errors by their ids."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from attrs import evolve, frozen

from forge_core.cli.command_line import with_examples
from forge_core.config import field_types
from forge_core.contracts.components import Command, Component
from forge_core.contracts.errors import ExitCode, JobError, PluginError, closest
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import wrapped
from forge_kit.tools.documented_keys import Key, class_doc, keys_of, one_paragraph
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import ANYTHING, FLAG, TEXT, Schema, array, keyed
from forge_plugin_author.error_ids import error_kinds

HEADING = "extend"


def command(argv: list[str]) -> int:
    """Explain a section, component, key or error id.

    The command lists keys with their types, defaults and allowed values, and the rules of their component. A key is
    named as messages name it, such as `model.attention.kv_heads`, without the type. Error ids are in the problems of
    `check --json`; the causes for which runs end, in `runs --json`, are ids too.
    """
    parser = argparse.ArgumentParser("forge-run explain", description=command.__doc__)
    parser.add_argument(
        "path", nargs="?", default="", metavar="PATH", help="`train`, `optimizer.adamw`, `train.steps`, `unknown-key` …"
    )
    add_json(parser)
    examples = ("optimizer.adamw", "model.attention.kv_heads", "train.precision --json", "unknown-key", "hang --json")
    with_examples(parser, *(f"forge-run explain {example}" for example in examples))
    options, catalog = parser.parse_args(argv), Catalog.installed()
    # Before anything is looked up: an id needs no component to be loaded, and a test keeps ids apart from names in jobs
    if error := error_kinds().get(options.path):
        keys = {"path": error.id, "doc": error.meaning, "types": [], "keys": [], "rules": []}
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
class Owned:
    """A key with the table that has it."""

    path: str
    """Of the table: `train`, `optimizer.adamw`."""
    table: type
    key: Key


@frozen
class Target:
    """Target of a path: a table of a known class, one key, or a kind whose type is still open."""

    path: str
    table: type | None = None
    kind: type[Component] | None = None
    key: Key | None = None
    owned: Sequence[Owned] = ()
    """The key again, once for each table that has it: a path without a type may mean several."""
    named: bool = False
    """Whether tables of the kind lie below it by names of their users: `parallel.vision_fsdp`."""
    chosen: bool = False
    """Whether one of several tables was chosen already, by its name or number, so that a key follows and no type."""


def find(path: str, catalog: Catalog) -> Target:
    """The target of a path; a `JobError` if nothing is called so."""
    target, rest = Target("", Job), [part for part in path.split(".") if part]
    while rest:
        taken, target = _step(target, rest, catalog)
        rest = rest[taken:]
    return target


def facts(target: Target, catalog: Catalog) -> dict[str, Any]:
    """The same as `explain` as plain types, for JSON; a default is TOML."""
    owned = target.owned
    if target.table is not None:
        owned = [Owned(target.path, target.table, key) for key in keys_of(target.table)]
    elif target.key is not None and not owned:
        owned = [Owned("", Job, target.key)]
    return {
        "path": target.path,
        "doc": class_doc(target.table) if target.table is not None else "",
        "types": catalog.types(target.kind.kind) if target.kind is not None else [],
        "keys": [_key_facts(each) for each in owned],
        "rules": [{"table": path, "rule": rule} for path, rules in _rules(target).items() for rule in rules],
    }


def _key_facts(owned: Owned) -> dict[str, Any]:
    key = owned.key
    types = {"name": key.name, "type": field_types.type_name(key.type), "choices": field_types.choices(key.type)}
    limits = [demand.text for demand in key.demands if demand.text]
    facts = {**types, "required": key.required, "default": key.default_text, "must": limits, "doc": key.doc}
    return {**facts, "table": owned.path}


def _rules(target: Target) -> dict[str, list[str]]:
    """The rules of the tables that a path means, by their paths; tables without any are left out."""
    tables = {each.path: each.table for each in target.owned}
    if target.table is not None:
        tables = {target.path: target.table}
    found = {path: rules_of(table) for path, table in tables.items()}
    return {path: rules for path, rules in found.items() if rules}


def rules_of(cls: type) -> list[str]:
    """Returns what a component checks beyond single keys: the documentation of its methods `…problems`."""
    methods: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        # The base class of a kind documents what a method is for, which is no rule
        own = {} if base is Component or "kind" in vars(base) else vars(base)
        methods |= {name: method for name, method in own.items() if name.endswith("problems") and name[0] != "_"}
    return [one_paragraph(doc) for method in methods.values() if (doc := inspect.getdoc(method))]


def explain(path: str, catalog: Catalog) -> str:
    """The text about `model.transformer.attention.gqa`: sections, types, keys. A `JobError` if nothing is called so."""
    target = find(path, catalog)
    if target.table is not None:
        return _explain_table(target, target.table, catalog)
    kind = _explain_kind(target.path, target.kind, catalog) if target.kind is not None else ""
    return "\n\n".join(filter(None, [*_explain_key(target, catalog), kind, _rule_lines(target)]))


def _explain_key(target: Target, catalog: Catalog) -> Iterator[str]:
    """The text about one key; of several tables, each text once, with the tables that it is true of."""
    if target.key is not None and len(target.owned) < 2:
        yield "\n".join(_key_lines(target.key, catalog))
        return
    texts: dict[str, list[str]] = {}
    for each in target.owned:
        texts.setdefault("\n".join(_key_lines(each.key, catalog)), []).append(each.path)
    for text, paths in texts.items():
        yield f"{text}\n{wrapped('of ' + ', '.join(paths), '    ')}"


def _rule_lines(target: Target) -> str:
    texts: dict[str, list[str]] = {}
    for path, rules in _rules(target).items():
        texts.setdefault(wrapped(" ".join(rules), "    "), []).append(path)
    return "\n".join(f"{wrapped('rules of ' + ', '.join(paths))}:\n{text}" for text, paths in texts.items())


def _step(target: Target, rest: list[str], catalog: Catalog) -> tuple[int, Target]:
    """One step along a path: the number of parts taken from `rest`, and the target they lead to."""
    prefix = f"{target.path}." if target.path else ""
    if target.kind is not None:
        if rest[0].isdecimal():  # a number of an array, as in data.sources.0
            return 1, evolve(target, path=prefix + rest[0], chosen=True)
        type_ = ".".join(rest) if any(":" in part for part in rest) else rest[0]  # a file or dotted path has dots
        if owned := _keys_of_types(target, type_, catalog):
            return 1, _target_of(prefix + type_, owned)
        if target.named and not target.chosen and _is_own_name(type_, target.kind, catalog):
            return 1, evolve(target, path=prefix + type_, chosen=True)
        cls = catalog.load(target.kind.kind, type_, target.kind)
        return len(rest) if ":" in type_ else 1, Target(prefix + type_, cls)
    keys = {key.name: key for key in keys_of(target.table)} if target.table is not None else {}
    path = prefix + rest[0]
    if rest[0] in keys:
        return 1, _target_of(path, [Owned(target.path, target.table or Job, keys[rest[0]])])
    if target.key is not None and target.table is not None and rest[0].isdecimal():
        return 1, evolve(target, path=path)  # of [[data.phases]]
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


def _keys_of_types(target: Target, name: str, catalog: Catalog) -> list[Owned]:
    """A key that is named without the type of the table that has it, as messages do: of each type with such a key."""
    base = target.kind
    if base is None or not name.isidentifier():
        return []
    found, types = [], catalog.types(base.kind)
    for type_ in types if target.chosen or name not in types else ():
        with suppress(PluginError):  # a type that cannot be loaded does not hide those that can
            cls = catalog.load(base.kind, type_, base)
            found += [Owned(f"{target.path}.{type_}", cls, key) for key in keys_of(cls) if key.name == name]
    return found


def _is_own_name(name: str, base: type[Component], catalog: Catalog) -> bool:
    """Whether a table is called so by its user: no type has the name, nor a similar one that may be meant."""
    types = catalog.types(base.kind)
    return name not in types and ":" not in name and closest(name, types) is None


def _target_of(path: str, owned: Sequence[Owned]) -> Target:
    # A table further down is the same in all of them, or the first one that takes a component decides
    deeper = (each.key for each in owned if field_types.component_in(each.key.type))
    key = next(deeper, owned[0].key)
    base = field_types.component_in(key.type)
    if base is None:
        return Target(path, table=section_in(key.type), key=key, owned=owned)
    either = len(field_types.members(key.type)) > 1  # a value or a component
    named = any(field_types.is_mapping(member) for member in field_types.members(key.type))
    return Target(path, kind=base, key=key if either else None, owned=owned if either else (), named=named)


def _explain_table(target: Target, cls: type, catalog: Catalog) -> str:
    form = field_types.header(target.path, target.key.type) if target.key is not None else "a job"
    title = f"{cls.kind} {catalog.type_of(cls)}" if field_types.is_component(cls) else form
    blocks = ["\n".join(_key_lines(key, catalog)) for key in keys_of(cls)]
    rules = [_rule_lines(target)] if _rules(target) else []
    return "\n\n".join([title, class_doc(cls), *(blocks or ["It has no keys."]), *rules]).rstrip()


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


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    texts = dict.fromkeys(("name", "type", "default", "doc", "table"), TEXT)
    key = keyed(**texts, choices=array(ANYTHING), required=FLAG, must=array(TEXT))
    rules = array(keyed(table=TEXT, rule=TEXT))
    return {"": keyed(path=TEXT, doc=TEXT, types=array(TEXT), keys=array(key), rules=rules, fix=TEXT, page=TEXT)}
