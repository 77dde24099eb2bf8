"""Generated and checked properties of this repository's distributions: adding one is adding a folder to `plugins/`.

python tools/workspace.py contracts    # import-linter, with every distribution in its contracts
python tools/workspace.py types        # mypy, over the package of every distribution
python tools/workspace.py readme       # the table of distributions in README.md (--check: is it up to date?)
python tools/workspace.py extra        # the extra `all` of forge-run in pyproject.toml (--check likewise)
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SHARED = ("forge_kit", "forge_testing")
"""Packages that every plugin may import."""
FLOORS = (
    "forge_core.cli",
    "forge_core.engine",
    "forge_core.data",
    "forge_core.checkpoint | forge_core.metrics",
    "forge_core.config",
    "forge_core.parallel",
    "forge_core.launch",
    "forge_core.plugins",
    "forge_core.losses | forge_core.schedules",
    "forge_core.job | forge_core.vocab_parallel",
    "forge_core.contracts",
    "forge_core.auxiliary",
)
"""Floors of the core, from the highest; each may import the ones below it."""
WITH = {"forge-plugin-evaluate": "[harness]", "forge-plugin-images": "[video]"}
"""Extras that belong to the extra `all`: without them a command or a kind that is offered cannot be used."""
JOB_EDGE = "forge_core.contracts.* -> forge_core.job"
"""The only import upwards, for type checkers: `problems(job, …)` receives the job."""


class Distribution:
    """One folder with a pyproject.toml."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def project(self) -> Mapping[str, Any]:
        """Its `[project]` table."""
        return tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]

    @property
    def name(self) -> str:
        return self.project["name"]

    @property
    def package(self) -> str:
        """The package that it installs."""
        return "forge_core" if self.folder == ROOT else self.name.replace("-", "_")

    @property
    def requires(self) -> set[str]:
        """Packages of this repository that it may import: its requirements, and those of its extras but `test`."""
        extras = self.project.get("optional-dependencies", {})
        lines = chain(self.project["dependencies"], *(extras[name] for name in extras if name != "test"))
        names = {re.split(r"[^\w-]", line)[0] for line in lines}
        return {name.replace("-", "_") for name in names if name.startswith("forge-")}

    @property
    def offers(self) -> Iterator[tuple[str, list[str]]]:
        """Kinds in order, each with the types that it offers."""
        for group, entries in self.project.get("entry-points", {}).items():
            yield group.removeprefix("forge."), list(entries)


def distributions() -> list[Distribution]:
    """The core first, then every folder of `plugins/`, by name."""
    return [
        Distribution(path.parent) for path in [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]
    ]


def circle(requirements: Mapping[str, set[str]]) -> list[str]:
    """Returns the names on a circle of requirements, the first also at its end; empty: there is none.

    Args:
        requirements: the names that each name requires, extras included.
    """
    passed: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in passed:
            return []
        found = next(filter(None, (search(other, [*path, name]) for other in sorted(requirements.get(name, ())))), [])
        passed.add(name)
        return found

    return next(filter(None, (search(name, []) for name in sorted(requirements))), [])


def contracts() -> Mapping[str, Any]:
    """Import-linter's configuration. Type-checking imports count like all others."""
    every = distributions()
    plugins = [each.package for each in every if each.package not in ("forge_core", *SHARED)]
    extends = {f"{each.package}.** -> {other}" for each in every for other in each.requires & set(plugins)}
    extends |= {f"{edge}.**" for edge in extends}
    return {
        "root_packages": [each.package for each in every],
        "include_external_packages": True,
        "contracts": [
            {
                "name": "The core imports no other distribution",
                "type": "forbidden",
                "source_modules": ["forge_core"],
                "forbidden_modules": [*SHARED, *plugins],
            },
            {"name": "Floors of the core", "type": "layers", "layers": FLOORS, "ignore_imports": [JOB_EDGE]},
            {
                "name": "forge-kit knows no plugin and no test kit",
                "type": "forbidden",
                "source_modules": ["forge_kit"],
                "forbidden_modules": ["forge_testing", *plugins],
            },
            {
                "name": "Plugins import one another only where they require it",
                "type": "independence",
                "modules": plugins,
                "ignore_imports": sorted(extends),
                "unmatched_ignore_imports_alerting": "none",
            },
            {
                "name": "Only author kits import the test kit",
                "type": "forbidden",
                "source_modules": [
                    each.package
                    for each in every
                    if "forge_testing" not in each.requires and each.package != "forge_testing"
                ],
                "forbidden_modules": ["forge_testing"],
            },
        ],
    }


def check_contracts() -> int:
    """Refuse circles between distributions, and run import-linter over all of them."""
    import tomli_w

    if names := circle({each.package: each.requires for each in distributions()}):
        print(f"a circle of requirements: {' -> '.join(names)}; let one declare a kind that the other implements")
        return 1

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "contracts.toml"
        path.write_text(tomli_w.dumps({"tool": {"importlinter": contracts()}}))
        command = [Path(sys.executable).with_name("lint-imports"), "--config", path, "--no-logo"]
        return subprocess.run([str(part) for part in command], cwd=ROOT, check=False).returncode


def check_types() -> int:
    """Run mypy over all distributions."""
    packages = [word for each in distributions() for word in ("-p", each.package)]
    paths = os.pathsep.join(str(each.folder) for each in distributions())
    environment = os.environ | {"MYPYPATH": paths}
    return subprocess.run([sys.executable, "-m", "mypy", *packages], cwd=ROOT, env=environment, check=False).returncode


# --- generated parts of files --------------------------------------------------------------------------------------


def readme_table() -> str:
    """A row for each distribution: its description and what it offers."""
    rows = [
        f"| `{each.name}` | {each.project['description'].rstrip('.')}{_offered(each)} |" for each in distributions()
    ]
    return "\n".join(["| install | what it is, and what jobs can name |", "|---|---|", *rows])


def _offered(distribution: Distribution) -> str:
    parts = [
        f"{kind} {', '.join(f'`{name}`' for name in types)}" for kind, types in distribution.offers if kind != "kind"
    ]
    return f": {'; '.join(parts)}" if parts else ""


def extra() -> str:
    """The extra that installs every distribution of this repository, at the versions of this repository."""
    lines = [f'    "{each.name}{WITH.get(each.name, "")}>={_minor(each)}",' for each in distributions()[1:]]
    return "\n".join(["all = [", *lines, "]"])


def _minor(distribution: Distribution) -> str:
    major, minor, _ = distribution.project["version"].split(".")
    return f"{major}.{minor},<{major}.{int(minor) + 1}"


def replace_between(path: Path, text: str, start: str, end: str, check: bool) -> int:
    """Put generated text between two marks of a file, or with `check`, say whether it stands there."""
    before = path.read_text()
    head, rest = before.split(f"{start}\n", 1)
    tail = rest.split(end, 1)[1]
    after = f"{head}{start}\n{text}\n{end}{tail}"
    if check and after != before:
        print(f"{path.name} is not up to date; run python {Path(__file__).relative_to(ROOT)}", file=sys.stderr)
        return 1
    if not check:
        path.write_text(after)
    return 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["contracts", "types", "readme", "extra"])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a file is out of date")
    options = parser.parse_args()
    if options.action == "contracts":
        return check_contracts()
    if options.action == "types":
        return check_types()
    if options.action == "readme":
        marks = ("<!-- distributions -->", "<!-- end of distributions -->")
        return replace_between(ROOT / "README.md", readme_table(), *marks, options.check)
    marks = ("# distributions, by tools/workspace.py", "# end of distributions")
    return replace_between(ROOT / "pyproject.toml", extra(), *marks, options.check)


if __name__ == "__main__":
    sys.exit(main())
