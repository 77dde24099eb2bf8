"""Generated and checked properties of this repository's distributions: adding one is adding a folder to `plugins/`.

python tools/workspace.py contracts    # import-linter, with every distribution in its contracts
python tools/workspace.py types        # mypy, over the package of every distribution
python tools/workspace.py packages     # the tables of distributions in docs/packages.md (--check: are they up to date?)
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
from collections.abc import Iterable, Iterator, Mapping
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
PURPOSES = (
    "Start, watch and use runs",
    "Models",
    "Data",
    "Optimizers, schedules and losses",
    "Fine-tuning",
    "Parallelism, precision and speed",
    "Loggers",
    "Evaluation and insight",
    "Reliability and launch",
    "For authors",
)
"""Headings of docs/packages.md, in order. A plugin's pyproject.toml names one of them: `[tool.forge]`, `purpose`."""
JOB_EDGE = "forge_core.contracts.* -> forge_core.job"
"""The only import upwards, for type checkers: `problems(job, …)` receives the job."""


class Distribution:
    """One folder with a pyproject.toml."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Its pyproject.toml."""
        return tomllib.loads((self.folder / "pyproject.toml").read_text())

    @property
    def project(self) -> Mapping[str, Any]:
        """Its `[project]` table."""
        return self.settings["project"]

    @property
    def purpose(self) -> str | None:
        """The heading of docs/packages.md that lists it; None: its pyproject.toml has none."""
        return self.settings.get("tool", {}).get("forge", {}).get("purpose")

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
            if group.startswith("forge"):  # others are of torch
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
            *(
                {
                    "name": name,
                    "type": "forbidden",
                    "source_modules": [
                        each.package
                        for each in every
                        if shared not in each.requires and each.package not in ("forge_core", shared)
                    ],
                    "forbidden_modules": [shared],
                    "allow_indirect_imports": shared == "forge_kit",  # whoever requires a plugin gets its requirements
                }
                for shared, name in (
                    ("forge_kit", "Plugins import forge-kit only where they require it"),
                    ("forge_testing", "Only author kits import the test kit"),
                )
            ),
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


def purpose_problems(plugins: Iterable[Distribution]) -> list[str]:
    """Returns a message for each plugin that names no purpose, or an unknown one."""
    allowed = ", ".join(f'"{purpose}"' for purpose in PURPOSES)
    return [
        f"{os.path.relpath(each.folder / 'pyproject.toml', ROOT)}: tool.forge.purpose: "
        f"{'missing' if each.purpose is None else f'unknown purpose {each.purpose!r}'}; allowed: {allowed}"
        for each in plugins
        if each.purpose not in PURPOSES
    ]


def package_tables(core: Distribution, plugins: Iterable[Distribution]) -> str:
    """The core's row, then a table for each purpose: descriptions, and what jobs and the command line can name."""
    by_purpose: dict[str, list[Distribution]] = {purpose: [] for purpose in PURPOSES}
    for each in plugins:
        by_purpose[str(each.purpose)].append(each)
    sections = [("The core", [core]), *((purpose, listed) for purpose, listed in by_purpose.items() if listed)]
    return "\n\n".join(f"## {heading}\n\n{_table(listed)}" for heading, listed in sections)


def _table(listed: Iterable[Distribution]) -> str:
    rows = [f"| {_link(each)} | {each.project['description'].rstrip('.')} | {_offered(each)} |" for each in listed]
    return "\n".join(["| package | description | offers |", "|---|---|---|", *rows])


def _link(distribution: Distribution) -> str:
    """The name, linked to the README of a plugin, which is a page of the site."""
    name = f"`{distribution.name}`"
    return name if distribution.folder == ROOT else f"[{name}](plugins/{distribution.name}.md)"


def _offered(distribution: Distribution) -> str:
    offers = [(kind, types) for kind, types in distribution.offers if kind != "kind"]
    kinds = [(kind.replace("forge_replaces", "replaces"), types) for kind, types in offers]
    return "; ".join(f"{kind} {', '.join(f'`{name}`' for name in types)}" for kind, types in kinds)


def write_packages(check: bool) -> int:
    """Write the tables of docs/packages.md, or with `check`, compare them."""
    core, *plugins = distributions()
    if problems := purpose_problems(plugins):
        print("\n".join(problems), file=sys.stderr)
        return 1
    marks = ("<!-- distributions -->", "<!-- end of distributions -->")
    return replace_between(ROOT / "docs" / "packages.md", f"\n{package_tables(core, plugins)}\n", *marks, check)


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
    parser.add_argument("action", choices=["contracts", "types", "packages", "extra"])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a file is out of date")
    options = parser.parse_args()
    if options.action == "contracts":
        return check_contracts()
    if options.action == "types":
        return check_types()
    if options.action == "packages":
        return write_packages(options.check)
    marks = ("# distributions, by tools/workspace.py", "# end of distributions")
    return replace_between(ROOT / "pyproject.toml", extra(), *marks, options.check)


if __name__ == "__main__":
    sys.exit(main())
