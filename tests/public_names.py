"""Which names of the core are public: those of `forge_core.__all__`, and those that docs/reference/ has by `:::`."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

import forge_core

DOCS = Path(__file__).parents[1] / "docs"
REFERENCE = re.compile(r"^::: (?P<target>[\w.]+)\n(?:    options:\n(?P<options>(?:      .*\n)*))?", re.MULTILINE)
MEMBERS = re.compile(r"members: \[(.*)\]")


@functools.cache
def documented() -> tuple[frozenset[str], frozenset[str]]:
    """Modules that the reference has as a whole, and single names that it has."""
    modules, names = set(), set()
    for page in DOCS.rglob("*.md"):
        for match in REFERENCE.finditer(page.read_text()):
            members = MEMBERS.search(match["options"] or "")
            names.add(match["target"])
            if members:
                names |= {f"{match['target']}.{name.strip()}" for name in members[1].split(",")}
            else:
                modules.add(match["target"])
    return frozenset(modules), frozenset(names)


def imported(source: str) -> Iterator[tuple[str, str]]:
    """Names that a source takes from the core, each with its module. Imports for type checkers count."""
    return imported_in(ast.walk(ast.parse(source)))


def imported_in(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """As `imported`, of the nodes of a syntax tree."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("forge_core"):
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.rpartition(".")[::2] for alias in node.names if alias.name.startswith("forge_core."))


def is_contract(module: str, name: str) -> bool:
    """Whether a name is kept from version to version: of `forge_core` itself, or of its contracts."""
    return module.startswith("forge_core.contracts") or (module == "forge_core" and name in forge_core.__all__)


def contract_names(core: Path) -> set[str]:
    """The names that are kept: `forge_core.__all__`, and what modules of `forge_core.contracts` define."""
    names = set(forge_core.__all__)
    for path in (core / "contracts").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")} | {"__version__"}


@functools.cache
def is_public(module: str, name: str) -> bool:
    """Whether authors of plugins may import this name: it is kept, or documented as provisional."""
    if module == "forge_core" and name in forge_core.__all__:
        return True
    modules, names = documented()
    home = getattr(getattr(import_module(module), name), "__module__", module)
    return bool({module, home} & modules or {f"{module}.{name}", f"{home}.{name}"} & names)
