"""What the pages say of kinds, hooks and events: made from base classes, specifications and suites.

Links begin with `/`, the root of the documentation; `generated.py` makes them relative to the page.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from forge_core.contracts.components import Command, Component, TrainingHook
from forge_core.contracts.hookspecs import PROJECT, ForgeHooks
from forge_core.engine.hooks import EVENTS
from forge_core.plugins.catalog import CORE, Catalog
from forge_core.plugins.manager import BUILD_HOOKS
from forge_kit.tools.documented_keys import class_doc, one_paragraph
from forge_testing import suites

COMPONENTS, PROTOCOLS = "/reference/components.md", "/reference/protocols.md"
HOMES = {
    "forge_core.contracts.model": PROTOCOLS,
    "forge_core.contracts.data": PROTOCOLS,
    "forge_core.contracts.optimizer": PROTOCOLS,
    "forge_core.contracts.runtime": PROTOCOLS,
    "forge_core.contracts.components": COMPONENTS,
    "forge_core.contracts.contexts": COMPONENTS,
    "forge_core.contracts.errors": "/reference/python.md",
}
"""Modules whose names are linked wherever they stand in a signature, and the page that documents them."""
EVENTS_PAGE, HOOKS_PAGE = "/training-hooks.md", "/reference/hooks.md"
OF_EVENTS = ("TrainingHook", "TrainContext", "StepContext", "CheckpointContext")
"""Names of these modules that the page of events documents."""
NO_BUILD = {
    "hook": f"nothing: the class is the running object; its [events]({EVENTS_PAGE}#events) are called",
    "plugin": f"nothing: the class is the running object; its [hooks]({HOOKS_PAGE}) are called",
}
"""What kinds are asked for whose classes are not built."""
BY_OTHER_SUITES = {"loader": "DatasetSuite", "packing": "DatasetSuite", "tokenizer": "DatasetSuite"}
"""Kinds without a suite of their own, and the one that tests them in the job around its component."""
FIRST, EVERY = "of the first that does not give None", "of all together"
Row = tuple[str, ...]


def core_kinds(catalog: Catalog) -> list[str]:
    """Kinds whose components stand in jobs and that have a page each, in alphabetical order."""
    declared = sorted(offer.type for offer in catalog.offers("kind") if offer.distribution.name == CORE)
    return [kind for kind in declared if kind != Command.kind]


def kind_rows(catalog: Catalog) -> list[Row]:
    """Kind, base class, what a component implements, hook around it, suite: for each kind of the core."""
    return [_kind_row(kind, catalog.kind_base(kind)) for kind in core_kinds(catalog)]


def _kind_row(kind: str, base: type[Component]) -> Row:
    page = f"[`{kind}`](/ten-minutes/{kind}.md)"
    asked = "<br>".join(signature(method) for method in asked_of(base)) or NO_BUILD[kind]
    return page, _base_link(base), asked, build_hook(kind), suite_of(kind, base)


def facts(kind: str, catalog: Catalog) -> list[Row]:
    """The same of one kind, a fact in a row, and what is installed of it."""
    _, base, asked, hook, suite = _kind_row(kind, catalog.kind_base(kind))
    types = ", ".join(f"[`{type_}`](/reference/keys/{kind}.md#{kind}.{type_})" for type_ in catalog.types(kind))
    rows = [("base class", base), ("to implement", asked), ("hook around it", hook), ("suite", suite)]
    return [*rows, ("there are", types or "none yet")]


def plugin_kind_rows(catalog: Catalog) -> list[Row]:
    """Kind, what for, what a component implements, distribution: for each kind that an installed plugin declares."""
    rows: list[Row] = []
    declared = [offer for offer in catalog.offers("kind") if offer.distribution.name != CORE]
    for offer in sorted(declared, key=lambda offer: offer.type):
        base = catalog.kind_base(offer.type)
        asked = "<br>".join(signature(method) for method in asked_of(base))
        rows.append((f"`{offer.type}`", one_paragraph(class_doc(base)), asked, f"`{offer.distribution.name}`"))
    return rows


def asked_of(base: type) -> list[Callable[..., Any]]:
    """The methods of a base class that its components must have: those that only raise NotImplementedError."""
    own = [member for member in vars(base).values() if inspect.isfunction(member)]
    return [method for method in own if "raise NotImplementedError" in inspect.getsource(method)]


def signature(method: Callable[..., Any]) -> str:
    """A method as one calls it, with the types linked to where they are documented."""
    returned = linked(str(inspect.signature(method).return_annotation))
    return f"`{method.__name__}`({arguments(method)}) → {returned}"


def arguments(method: Callable[..., Any]) -> str:
    """What a method is given besides `self`, each with its type."""
    parameters = [item for item in inspect.signature(method).parameters.values() if item.name != "self"]
    return ", ".join(f"{item.name}: {linked(str(item.annotation))}" for item in parameters)


def linked(annotation: str) -> str:
    """An annotation, each name in it a link if the reference has it."""
    escaped = re.sub(r"[\[\]]", lambda bracket: f"\\{bracket[0]}", annotation)
    return re.sub(r"[A-Za-z_][\w.]*", lambda name: _link(name[0]), escaped)


def _link(name: str) -> str:
    name = name.removeprefix("contexts.")
    for home, page in HOMES.items():
        if name in defined_in(import_module(home)):
            return f"[`{name}`]({EVENTS_PAGE if name in OF_EVENTS else page}#{home}.{name})"
    return f"`{name}`"


def defined_in(module: ModuleType) -> set[str]:
    """Names of classes, functions and constants that a module itself defines."""
    names: set[str] = set()
    for statement in ast.parse(inspect.getsource(module)).body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign):
            names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return names


def _base_link(base: type) -> str:
    page = EVENTS_PAGE if base.__name__ in OF_EVENTS else COMPONENTS
    return f"[`{base.__name__}`]({page}#{base.__module__}.{base.__name__})"


def build_hook(kind: str) -> str:
    """The hook through which components of a kind are built, if there is one."""
    name = BUILD_HOOKS.get(kind, f"forge_build_{kind}")
    return hook_link(name) if name in specifications() else "none"


def hook_link(name: str) -> str:
    """A link to the documentation of a hook."""
    return f"[`{name}`]({HOOKS_PAGE}#{ForgeHooks.__module__}.{ForgeHooks.__name__}.{name})"


def suite_of(kind: str, base: type) -> str:
    """The suite whose `component` is of a base class, by its annotation."""
    for name in suites.__all__:
        annotation = inspect.get_annotations(getattr(suites, name)).get("component", "")
        if re.search(rf"\b{base.__name__}\b", str(annotation)):
            return _suite_link(name)
    return f"{_suite_link(BY_OTHER_SUITES[kind])} of a dataset" if kind in BY_OTHER_SUITES else "none"


def _suite_link(name: str) -> str:
    return f"[`{name}`](/testing.md#{getattr(suites, name).__module__}.{name})"


def specifications() -> Mapping[str, Callable[..., Any]]:
    """Every hook that the core specifies, by name."""
    return {name: member for name, member in vars(ForgeHooks).items() if hasattr(member, f"{PROJECT}_spec")}


def hook_rows() -> list[Row]:
    """Hook, its arguments, which implementations decide, what for: for each hook of the core."""
    return [_hook_row(name, method) for name, method in specifications().items()]


def _hook_row(hook: str, method: Callable[..., Any]) -> Row:
    options = getattr(method, f"{PROJECT}_spec")
    names = ", ".join(f"`{name}`" for name in inspect.signature(method).parameters if name != "self")
    purpose = one_paragraph(inspect.getdoc(method) or "")
    notices = [options["warn_on_impl"], *(options["warn_on_impl_args"] or {}).values()]
    purpose = " ".join([purpose, *(f"To go: {notice}." for notice in notices if notice)])
    return hook_link(hook), names or "none", FIRST if options["firstresult"] else EVERY, purpose


def event_rows() -> Iterator[Row]:
    """Event, its arguments besides the hook, when it is called: for each event of a run."""
    for name in EVENTS:
        method = getattr(TrainingHook, name)
        yield f"`{name}`", arguments(method), one_paragraph(inspect.getdoc(method) or "")
