"""`forge-run`: finds the command and reports errors as a user should see them.

Commands are components of kind `command`: they are listed from metadata, and imported when called.
"""

from __future__ import annotations

import ast
import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

from forge_core.cli.tables import columns
from forge_core.contracts.errors import ExitCode, ForgeError, JobError, did_you_mean
from forge_core.plugins.catalog import CORE, Catalog, Offer
from forge_core.plugins.offers import first_party

USAGE = """\
usage: forge-run JOB.toml [MORE.toml …] [--section.key=value …]
       forge-run COMMAND …

Trains what a job file describes. Several files are layered from left to right, overrides come last.

commands (forge-run COMMAND --help lists the options of one):
"""

_python_format = warnings.formatwarning
OPTIONS = [
    ("  -h, --help", "this text"),
    ("  --version", "versions of the core and of every installed plugin distribution"),
]


def main(argv: list[str] | None = None) -> int:
    """Run one command line.

    Returns:
        The exit code.
    """
    # Only as a program: where `main` is called from Python, warnings belong to the caller.
    if argv is None:
        argv = sys.argv[1:]
        warnings.formatwarning = _format_warning
    try:
        code = int(_dispatch(argv))
        sys.stdout.flush()  # here, so that a reader that has ended is met below and not at exit
        return code
    except JobError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except ForgeError as error:
        print(f"forge-run: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of the output has ended: `forge-run plugins | head`
        # Python flushes once more when it exits, and would print a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Forge's own warnings without the line of code that raised them, which is of no use to users."""
    ours = Path(filename).is_relative_to(Path(__file__).parents[1])
    return f"warning: {message}\n" if ours else _python_format(message, category, filename, lineno, line)


def _dispatch(argv: list[str]) -> int:
    first = argv[0] if argv else "--help"
    catalog = Catalog.installed()
    if first in ("-h", "--help", "--version"):
        print(version_text(catalog) if first == "--version" else help_text(catalog))
        return ExitCode.FINISHED
    # A job file or an override; by its name too, so that a file that is missing is reported as one.
    is_job = first.endswith(".toml") or first.startswith("-") or Path(first).is_file()
    name, rest = ("run", argv) if is_job else (first, argv[1:])
    return catalog.load_offer(find_command(catalog, name))(rest)


def find_command(catalog: Catalog, name: str) -> Offer:
    """The installed command `name`, or `distribution/name`.

    Raises:
        JobError: there is none, or several distributions offer it. For a command of a first-party distribution, the
            message has the line that installs it.
    """
    offers = catalog.matching("command", name)
    if not offers:
        first_party_commands = first_party()["command"]
        if distribution := first_party_commands.get(name):
            raise JobError(f"forge-run: the command {name!r} is not installed: pip install {distribution}")
        names = catalog.types("command")
        hint = did_you_mean(name, [*names, *first_party_commands]) or f". Commands: {', '.join(names)}"
        raise JobError(f"forge-run: {name!r} is no command and no job file{hint}")
    if len(offers) > 1:
        choices = " or ".join(f"forge-run {offer.qualified}" for offer in offers)
        raise JobError(f"forge-run: several distributions offer the command {name!r}; choose with {choices}")
    return offers[0]


def help_text(catalog: Catalog) -> str:
    """Usage and every installed command, those of the core first. Imports none of them."""
    offers = sorted(catalog.offers("command"), key=lambda offer: (offer.distribution.name != CORE, offer.type))
    rows = [(f"  {offer.type}", _help_line(offer)) for offer in offers]
    return f"{USAGE}{columns(rows)}\n\noptions:\n{columns(OPTIONS)}"


def _help_line(offer: Offer) -> str:
    module, _, function = offer.value.partition(":")
    origin = "" if offer.distribution.name == CORE else f"(from {offer.distribution})"
    return " ".join(filter(None, (function_summary(module, function), origin)))


def function_summary(module: str, function: str) -> str:
    """First line of a function's docstring, read from its source without importing anything; empty if there is none."""
    package, *names = module.split(".")
    spec = find_spec(package)  # of the package alone: find_spec("a.b") would import a
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        source = Path(folder).joinpath(*names)
        for path in (source.with_suffix(".py"), source / "__init__.py"):
            if path.is_file():
                return _summary_in(path, function)
    return ""


def _summary_in(path: Path, function: str) -> str:
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.FunctionDef) and statement.name == function:
            return (ast.get_docstring(statement) or "").partition("\n")[0]
    return ""


def version_text(catalog: Catalog) -> str:
    """One line for the core, and one for each other distribution that offers something to Forge."""
    distributions = {offer.distribution.name: offer.distribution for offer in catalog.all_offers()}
    ordered = sorted(distributions.values(), key=lambda distribution: (distribution.name != CORE, distribution.name))
    return "\n".join(str(distribution) for distribution in ordered)
