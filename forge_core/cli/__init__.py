"""`forge-run`: finds the command and reports errors as a user should see them.

Commands are components of kind `command`: they are listed from metadata, and imported when called.
"""

from __future__ import annotations

import ast
import os
import signal
import sys
import warnings
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import Any

from forge_core.config.tree import hints
from forge_core.contracts.components import Command
from forge_core.contracts.errors import ExitCode, JobError, closest, in_words
from forge_core.plugins.catalog import CORE, Catalog, first_party

USAGE = """\
usage: forge-run JOB.toml [MORE.toml …] [--section.key=value …]
       forge-run COMMAND …  (a description: forge-run inside lens --help)

Trains a job. Job files are layered from left to right; overrides come last.

"""

HEADINGS = ("start", "train", "watch", "use", "keep", "extend")
"""Headings of the list of commands, in order. A module names its heading by a constant `HEADING`."""

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


def _format_warning(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
    """Without the line of code that raised it, which is of no use to users; Forge's own without their place, too."""
    ours = Path(filename).is_relative_to(Path(__file__).parents[1])
    return f"warning: {message}\n" if ours else _python_format(message, category, filename, lineno, line or "")


def _dispatch(argv: list[str], as_program: bool) -> int:
    if argv[:1] == ["help"] and argv[1:]:
        argv = [*argv[1:], "--help"]
    first = argv[0] if argv else "--help"
    catalog = Catalog.installed()
    if first in ("-h", "--help", "help", "--version", "version"):
        print(version_text(catalog) if first.endswith("version") else help_text(catalog))
        return ExitCode.FINISHED
    # A job file or an override; by its name too, so that a file that is missing is reported as one.
    is_file = Path(first).is_file() and not catalog.matching("command", first)  # called `runs`, say
    is_job = first.endswith(".toml") or first[:1] in ("-", "+") or "=" in first or is_file
    name, rest = ("run", argv) if is_job else (first, argv[1:])
    pair, names = " ".join(argv[:2]), catalog.types("command")
    # Of `inside lens` and others, but no command itself
    is_group = first in {each.partition(" ")[0] for each in names}.difference(names)
    if is_group and rest in ([], ["--help"], ["-h"]):
        print(help_text(catalog, f"{first} "))
        return ExitCode.FINISHED
    if is_group or catalog.matching("command", pair) or pair in first_party()["command"]:
        name, rest = pair, argv[2:]
    command = find_command(catalog, name)
    if as_program and name != "run":  # in place of what `forge_core.__main__` has set
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    return command(rest)


def find_command(catalog: Catalog, name: str) -> Command:
    """The installed command `name`, or `distribution/name`: its function.

    Raises a `JobError` if there is none, which has the line that installs a first-party one, or if several offer it.
    """
    offers = catalog.matching("command", name)
    if not offers:
        first_party_commands = first_party()["command"]
        if distribution := first_party_commands.get(name):
            raise JobError(f"forge-run: the command {name!r} is not installed: pip install {distribution}")
        names = catalog.types("command")
        if os.path.isdir(name):
            raise JobError(f"forge-run: {name!r} is a folder; to continue a run: forge-run resume {name}")
        likely = closest(name, [*names, *first_party_commands, *hints("commands")]) or ""
        meant = {"": f"commands: {', '.join(names)}", **hints("commands")}.get(likely, f"did you mean {likely!r}?")
        raise JobError(f"forge-run: {name!r} is no command and no job file; {meant}")
    if len(offers) > 1:
        choices = " or ".join(f"forge-run {offer.qualified}" for offer in offers)
        raise JobError(f"forge-run: several distributions offer the command {name!r}; choose with {choices}")
    return catalog.load_offer(offers[0])


def help_text(catalog: Catalog, group: str = "") -> str:
    """Usage and every installed command below headings, or the commands of a group alone. Imports none of them."""
    sections: dict[str, dict[str, str]] = {heading: {} for heading in HEADINGS}
    for offer in catalog.offers("command"):
        if not offer.type.startswith(group):
            continue
        name, _, member = offer.type.removeprefix(group).partition(" ")
        heading, text, of_group = command_summary(offer.value)
        commands = sections.setdefault(heading, {})
        if member:
            text = f"{of_group} {commands.get(name, '')}[{member}]".lstrip()
        elif offer.distribution.name not in (CORE, first_party()["command"].get(offer.type)):
            text += f" (from {offer.distribution})"
        commands[name] = f"{text} "
    lines = []
    for heading, commands in sections.items():
        lines += [f"{heading or 'more'}:"] * (bool(commands) and not group)
        lines += [fill(f"  {name:<13} {text}", 80, subsequent_indent=" " * 16) for name, text in commands.items()]
    return USAGE * (not group) + "\n".join(lines)


def command_summary(value: str) -> tuple[str, str, str]:
    """Heading and summary of the command that an entry point names, and the summary of its group; empty without.

    They are the constant `HEADING` of its module, the first line of its docstring, and the constant `GROUP`, which one
    command of a group has. They are read from the source without importing anything.
    """
    module, _, function = value.partition(":")
    package, *names = module.split(".")
    spec = find_spec(package)  # of the package alone: find_spec("a.b") would import a
    for name in names:
        spec = spec and PathFinder.find_spec(name, spec.submodule_search_locations)
    summary, constants = "", {"HEADING": "", "GROUP": ""}
    for node in ast.parse(Path(spec.origin).read_text("utf-8")).body if spec and spec.origin else ():
        if isinstance(node, ast.FunctionDef) and node.name == function:
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
        elif isinstance(node, ast.Assign) and (name := ast.unparse(node.targets[0])) in constants:
            constants[name] = ast.literal_eval(node.value)
    return constants["HEADING"], summary, constants["GROUP"]


def version_text(catalog: Catalog) -> str:
    """One line for the core, and one for each other distribution that offers something to Forge."""
    distributions = sorted(
        {offer.distribution for offer in catalog.offers()}, key=lambda each: (each.name != CORE, each.name)
    )
    return "\n".join(map(str, distributions))
