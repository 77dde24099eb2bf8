"""The figures that the house keeps: python tests/measure.py (`make measure`).

`LIMITS` has for each what the tests allow now, and the goal.
"""

from __future__ import annotations

import ast
import functools
import io
import statistics
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tools")]

from plain_words import COMMENT, nodes, per_10_000, tree  # noqa: E402
from public_names import contract_names, imported_in, is_contract, is_public  # noqa: E402
from workspace import FLOORS  # noqa: E402

ROOT = Path(__file__).parents[1]
CORE = ROOT / "forge_core"
TESTING = "forge-testing"


class Limit(NamedTuple):
    """What a figure must not exceed."""

    now: float
    goal: float


LIMITS: Mapping[str, Limit] = {
    "core: statements": Limit(7_500, 7_500),
    "core: tokens": Limit(90_000, 90_000),
    "core: tokens, with one for each docstring": Limit(90_500, 90_000),
    "core: files": Limit(120, 120),
    "engine: statements": Limit(1_500, 1_500),
    "core: longest function": Limit(45, 45),
    "core: median function": Limit(6, 6),
    "core: public names": Limit(150, 150),
    "plugins: provisional names of the core": Limit(200, 150),
    "core: modules that nothing reaches": Limit(0, 0),
    "core: imports upwards": Limit(0, 0),
    "core: hasattr on components": Limit(0, 0),
    "plugins: private names of the core": Limit(0, 0),
    "forge-testing: private names of the core": Limit(0, 0),
    "core: public functions without a docstring, %": Limit(10, 10),
    "plugins: public functions without a docstring, %": Limit(10, 10),
    "plugins: lines for each comment": Limit(25, 25),
    "distributions": Limit(58, 58),
    "commands": Limit(28, 28),
    "docs: words of no plain English per 10,000": Limit(3, 3),
    "docstrings: words of no plain English per 10,000": Limit(4, 4),
    "messages: words of no plain English per 10,000": Limit(3, 3),
}

NO_COMPONENT = {
    "to_local": "tells DTensors from plain tensors",
    "parametrizations": "torch puts it on modules",
    "posix_fadvise": "os has it on some platforms only",
    "sched_getaffinity": "os has it on some platforms only",
}
"""Attributes that `hasattr` may ask for: not of components, nor of what they build. Each with the reason."""


# --- files and lines --------------------------------------------------------------------------------------------------


def modules(folder: Path) -> list[Path]:
    """The Python files below a folder, without templates."""
    return [path for path in sorted(folder.rglob("*.py")) if "templates" not in path.parts]


def lines(folder: Path) -> int:
    """Lines that are not blank, comments and docstrings included."""
    return sum(1 for path in modules(folder) for line in path.read_text().splitlines() if line.strip())


def statements(folder: Path) -> int:
    """Statements, docstrings and documentation of fields excluded: what a reader has to follow, in any layout."""
    every = (node for path in modules(folder) for node in nodes(path))
    return sum(isinstance(node, ast.stmt) and not is_text(node) for node in every)


def is_text(node: ast.AST) -> bool:
    """Whether a statement is a docstring, or documents a field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
"""Tokens that a formatter could add or remove."""


def texts(folder: Path) -> int:
    """Docstrings, and strings that document fields."""
    return sum(is_text(node) for path in modules(folder) for node in nodes(path))


def tokens(folder: Path) -> int:
    """Tokens of the source, without docstrings, comments and layout. A string is one token, whatever its length."""
    count, within = -texts(folder), 0
    for path in modules(folder):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            name = tokenize.tok_name[token.type]
            within -= name == "FSTRING_END"
            count += token.type not in LAYOUT and not within and name != "FSTRING_END"
            within += name == "FSTRING_START"  # from Python 3.12 on, its parts are tokens
    return count


def function_lengths(folder: Path) -> list[int]:
    """Lines of every function and method, from `def` to its end, docstring included."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = (node for path in modules(folder) for node in nodes(path) if isinstance(node, kinds))
    return sorted((node.end_lineno or 0) - node.lineno + 1 for node in found)


def comments(folder: Path) -> int:
    """Comments for readers, not for tools."""
    return sum(len(COMMENT.findall(path.read_text())) for path in modules(folder))


def docstring_lines(folder: Path) -> int:
    """Lines of strings that stand by themselves: docstrings, and documentation of fields."""
    count = 0
    for path in modules(folder):
        source = path.read_text().splitlines()
        for node in nodes(path):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                count += sum(1 for line in source[node.lineno - 1 : node.end_lineno] if line.strip())
    return count


# --- imports ----------------------------------------------------------------------------------------------------------


def name_of(path: Path) -> str:
    """`forge_core.engine.step`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def core_modules() -> Mapping[str, Path]:
    """Every module of the core by name."""
    return {name_of(path): path for path in modules(CORE)}


def targets(node: ast.AST) -> Iterator[str]:
    """Modules of the core that a statement imports, or that a string names."""
    known = core_modules()
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
    elif isinstance(node, ast.ImportFrom) and node.module in known:
        below = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from [name for name in below if name in known] or [str(node.module)]


def for_type_checkers(module: ast.Module) -> set[ast.AST]:
    """All nodes below `if TYPE_CHECKING:`."""
    blocks = [n for n in ast.walk(module) if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")]
    return {node for block in blocks for node in ast.walk(block)}


def imports(name: str) -> set[str]:
    """Modules of the core that a module imports when it runs: at the top, in functions, by a name in a string."""
    module = tree(core_modules()[name])
    skipped = for_type_checkers(module)
    kept = [node for node in nodes(core_modules()[name]) if node not in skipped]
    found = {target for node in kept for target in targets(node)}
    strings = {node.value for node in kept if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return found | strings & core_modules().keys()


def entry_modules() -> set[str]:
    """Where a run, or a command of the core, begins: its entry points, and the names that `forge_core` exports."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["scripts"], *project["entry-points"].values()]
    return {
        "forge_core",
        "forge_core.__main__",
        *(value.partition(":")[0] for group in groups for value in group.values()),
    }


def unreached() -> list[str]:
    """Modules of the core that neither a run nor a command of the core comes to."""
    waiting, reached = list(entry_modules()), set[str]()
    while waiting:
        name = waiting.pop()
        if name in reached or name not in core_modules():
            continue
        reached.add(name)
        waiting += [*imports(name), name.rpartition(".")[0]]
    return sorted(core_modules().keys() - reached)


def floor_of(name: str) -> int | None:
    """Number of the floor on which a module is, 0 the highest; None for those that stand outside."""
    for number, floor in enumerate(FLOORS):
        if any(name == room or name.startswith(f"{room}.") for room in floor.split(" | ")):
            return number
    return None


def imports_upwards() -> list[str]:
    """Imports of a higher floor, those for type checkers included, but for the job in `problems(job, …)`."""
    found = []
    for name, path in core_modules().items():
        for target in sorted({target for node in nodes(path) for target in targets(node)}):
            here, there = floor_of(name), floor_of(target)
            the_job = name.startswith("forge_core.contracts") and target == "forge_core.job"
            if here is not None and there is not None and there < here and not the_job:
                found.append(f"{name} -> {target}")
    return found


def probes() -> list[str]:
    """Places in the core that ask by `hasattr` what a component, or what it builds, can do."""
    found = []
    for path in modules(CORE):
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr":
                asked = node.args[1].value if isinstance(node.args[1], ast.Constant) else "?"
                if asked not in NO_COMPONENT:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {asked}")
    return found


def private_imports() -> Mapping[str, list[str]]:
    """By distribution, the names of the core that it imports though they are not public."""
    found: dict[str, list[str]] = {}
    for folder in sorted((ROOT / "plugins").iterdir()):
        paths = [path for path in modules(folder) if "tests" not in path.relative_to(folder).parts[:1]]
        used = {pair for path in paths if "benchmarks" not in path.parts for pair in imported_in(nodes(path))}
        if names := sorted(f"{module}.{name}" for module, name in used if not is_public(module, name)):
            found[folder.name] = names
    return found


def provisional_imports() -> set[tuple[str, str]]:
    """Names of the core that plugins import, documented but not kept from version to version, each with its module."""
    paths = (path for folder in packages()[1:] for path in modules(folder))
    return {pair for path in paths for pair in imported_in(nodes(path)) if not is_contract(*pair)}


# --- distributions and their documentation ----------------------------------------------------------------------------


def packages() -> list[Path]:
    """The package of every distribution that users install, the core's first."""
    plugins = sorted((ROOT / "plugins").glob("forge-*/forge_*"))
    return [CORE, *(path for path in plugins if path.is_dir() and path.parent.name != TESTING)]


def commands() -> list[str]:
    """Names behind `forge-run`; a group, such as `inside`, is one."""
    files = (ROOT / "pyproject.toml", *sorted((ROOT / "plugins").glob("*/pyproject.toml")))
    tables = (tomllib.loads(path.read_text())["project"].get("entry-points", {}) for path in files)
    return sorted({name.partition(" ")[0] for table in tables for name in table.get("forge.command", ())})


def public_functions(path: Path) -> Iterator[tuple[str, bool]]:
    """Functions and methods of a file whose names have no underscore, and whether each has a docstring."""
    waiting: list[ast.AST] = [tree(path)]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                yield f"{name_of(path)}:{node.lineno} {node.name}", ast.get_docstring(node) is not None
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                waiting.append(node)


def undocumented(folders: Iterable[Path]) -> float:
    """Share of public functions and methods that have no docstring, in percent."""
    having = [has for folder in folders for path in modules(folder) for _, has in public_functions(path)]
    return round(100 * (1 - sum(having) / len(having)), 1)


# --- all together -----------------------------------------------------------------------------------------------------


@functools.cache
def figures() -> Mapping[str, float]:
    """Every figure by name."""
    lengths, private, plugins = function_lengths(CORE), private_imports(), packages()[1:]
    total = lines(CORE)
    return {
        "core: statements": statements(CORE),
        "core: tokens": tokens(CORE),
        "core: tokens, with one for each docstring": tokens(CORE) + texts(CORE),
        "core: lines": total,
        "core: files": len(modules(CORE)),
        "engine: statements": statements(CORE / "engine"),
        "core: median lines of a file": statistics.median(len(path.read_text().split("\n")) for path in modules(CORE)),
        "core: median function": statistics.median(lengths),
        "core: 90 % of functions": lengths[int(0.9 * len(lengths))],
        "core: longest function": lengths[-1],
        "core: comments per 100 lines": round(100 * comments(CORE) / total, 1),
        "core: docstring lines per 100 lines": round(100 * docstring_lines(CORE) / total, 1),
        "core: public names": len(contract_names(CORE)),
        "plugins: provisional names of the core": len(provisional_imports()),
        "core: modules that nothing reaches": len(unreached()),
        "core: imports upwards": len(imports_upwards()),
        "core: hasattr on components": len(probes()),
        "plugins: private names of the core": sum(len(names) for key, names in private.items() if key != TESTING),
        "plugins: those that import such": sum(1 for key in private if key != TESTING),
        "forge-testing: private names of the core": len(private.get(TESTING, [])),
        "core: public functions without a docstring, %": undocumented([CORE]),
        "plugins: public functions without a docstring, %": undocumented(plugins),
        "plugins: lines for each comment": round(sum(map(lines, plugins)) / sum(map(comments, plugins)), 1),
        "distributions": len(list((ROOT / "plugins").glob("*/pyproject.toml"))) + 1,
        "commands": len(commands()),
        **{f"{kind}: words of no plain English per 10,000": value for kind, value in per_10_000().items()},
    }


def details() -> Mapping[str, list[str]]:
    """What the counts are made of."""
    private = private_imports()
    return {
        "core: modules that nothing reaches": unreached(),
        "core: imports upwards": imports_upwards(),
        "core: hasattr on components": probes(),
        **{f"{key}: private names of the core": names for key, names in private.items()},
    }


def main() -> None:
    width = max(map(len, figures()))
    for name, value in figures().items():
        limit = LIMITS.get(name)
        allowed = f"  (limit {limit.now:g}, goal {limit.goal:g})" if limit else ""
        print(f"{name:<{width}}  {value:>8g}{allowed}")
    for name, entries in details().items():
        if entries:
            print(f"\n{name}:", *entries, sep="\n  ")


if __name__ == "__main__":
    main()
