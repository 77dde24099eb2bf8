"""`forge-run`: finds the command and reports errors as a user should see them.

Commands are components of kind `command`: they are listed from metadata, and imported when called.
"""

from __future__ import annotations

import ast
import os
import shutil
import signal
import sys
import textwrap
import warnings
from importlib.util import find_spec
from pathlib import Path

from forge_core.config.tree import hints
from forge_core.contracts.errors import ExitCode, JobError, closest, in_words
from forge_core.plugins.catalog import CORE, Catalog, Offer, first_party

USAGE = """\
usage: forge-run JOB.toml [MORE.toml …] [--section.key=value …]
       forge-run COMMAND …

Trains what a job file describes. Several files are layered from left to right, overrides come last.

commands (forge-run COMMAND --help lists the options of one):
"""

OPTIONS = """

options:
  -h, --help  this text
  --version   versions of the core and of every installed plugin distribution"""

_python_format = warnings.formatwarning


def main(argv: list[str] | None = None) -> int:
    """Run one command line, and return the exit code."""
    # Only as a program: where `main` is called from Python, warnings belong to the caller.
    as_program = argv is None
    if as_program:
        warnings.formatwarning = _format_warning
    try:
        code = int(_dispatch(sys.argv[1:] if argv is None else argv, as_program))
        sys.stdout.flush()  # here, so that a reader that has ended is met below and not at exit
        return code
    except KeyboardInterrupt:  # not of `run`, which ends in its own ways
        print("forge-run: interrupted", file=sys.stderr)
        return ExitCode.SECOND_SIGNAL
    except BrokenPipeError:  # the reader of the output has ended: `forge-run plugins | head`
        # Python flushes once more when it exits, and would print a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except Exception as error:
        if not (text := in_words(error)):
            raise
        print(text, file=sys.stderr)
        return int(getattr(error, "exit_code", ExitCode.FAILED))


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Forge's own warnings without the line of code that raised them, which is of no use to users."""
    ours = Path(filename).is_relative_to(Path(__file__).parents[1])
    return f"warning: {message}\n" if ours else _python_format(message, category, filename, lineno, line)


def _dispatch(argv: list[str], as_program: bool) -> int:
    first = argv[0] if argv else "--help"
    catalog = Catalog.installed()
    if first in ("-h", "--help", "help", "--version", "version"):
        print(version_text(catalog) if first.endswith("version") else help_text(catalog))
        return ExitCode.FINISHED
    # A job file or an override; by its name too, so that a file that is missing is reported as one.
    is_file = Path(first).is_file() and not catalog.matching("command", first)  # called `runs`, say
    is_job = first.endswith(".toml") or first[:1] in ("-", "+") or "=" in first or is_file
    name, rest = ("run", argv) if is_job else (first, argv[1:])
    command = catalog.load_offer(find_command(catalog, name))
    if as_program and name != "run":  # in place of what `forge_core.__main__` has set
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    return command(rest)


def find_command(catalog: Catalog, name: str) -> Offer:
    """The installed command `name`, or `distribution/name`.

    Raises a `JobError` if there is none, which has the line that installs a first-party one, or if several offer it.
    """
    offers = catalog.matching("command", name)
    if not offers:
        first_party_commands = first_party()["command"]
        if distribution := first_party_commands.get(name):
            raise JobError(f"forge-run: the command {name!r} is not installed: pip install {distribution}")
        names = catalog.types("command")
        if os.path.isdir(name):
            is_run = os.path.isfile(os.path.join(name, "job.toml"))
            hint = f"a run folder; to continue it: forge-run resume {name}" if is_run else "a folder, and no job file"
            raise JobError(f"forge-run: {name!r} is {hint}")
        likely = closest(name, [*names, *first_party_commands, *hints("commands")]) or ""
        meant = {"": f"commands: {', '.join(names)}", **hints("commands")}.get(likely, f"did you mean {likely!r}?")
        raise JobError(f"forge-run: {name!r} is no command and no job file; {meant}")
    if len(offers) > 1:
        choices = " or ".join(f"forge-run {offer.qualified}" for offer in offers)
        raise JobError(f"forge-run: several distributions offer the command {name!r}; choose with {choices}")
    return offers[0]


def help_text(catalog: Catalog) -> str:
    """Usage and every installed command, the core's commands first. Imports none of them."""
    offers = sorted(catalog.offers("command"), key=lambda offer: (offer.distribution.name != CORE, offer.type))
    margin, width = max(len(offer.type) for offer in offers) + 4, shutil.get_terminal_size().columns
    lines = []
    for offer in offers:
        is_known = offer.distribution.name in (CORE, first_party()["command"].get(offer.type))
        module, _, function = offer.value.partition(":")
        text = f"{function_summary(module, function)}{'' if is_known else f' (from {offer.distribution})'}".strip()
        wrapping = textwrap.TextWrapper(max(width, margin + 20), f"  {offer.type}".ljust(margin), " " * margin)
        lines.append(wrapping.fill(text))
    return USAGE + "\n".join(lines) + OPTIONS


def function_summary(module: str, function: str) -> str:
    """First line of a function's docstring, read from its source without importing anything; empty if there is none."""
    package, *names = module.split(".")
    spec = find_spec(package)  # of the package alone: find_spec("a.b") would import a
    folders = spec.submodule_search_locations or () if spec else ()
    sources = [Path(folder).joinpath(*names) for folder in folders]
    paths = [path for each in sources for path in (each.with_suffix(".py"), each / "__init__.py") if path.is_file()]
    statements = ast.parse(paths[0].read_text(encoding="utf-8")).body if paths else []
    functions = (each for each in statements if isinstance(each, ast.FunctionDef))
    docs = (ast.get_docstring(each) for each in functions if each.name == function)
    return (next(docs, None) or "").partition("\n")[0]


def version_text(catalog: Catalog) -> str:
    """One line for the core, and one for each other distribution that offers something to Forge."""
    distributions = {offer.distribution for offer in catalog.offers()}
    ordered = sorted(distributions, key=lambda distribution: (distribution.name != CORE, distribution.name))
    return "\n".join(str(distribution) for distribution in ordered)
