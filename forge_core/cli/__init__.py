"""`forge-run`: finds the command and reports errors as a user should see them."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import TextIO

from forge_core.cli.commands import find_command, help_rows
from forge_core.cli.tables import columns
from forge_core.contracts.errors import ExitCode, ForgeError, JobError
from forge_core.plugins.catalog import CORE, Catalog

USAGE = """\
usage: forge-run JOB.toml [MORE.toml …] [--section.key=value …]
       forge-run COMMAND …

Trains what a job file describes. Several files are layered from left to right, overrides come last.

commands (forge-run COMMAND --help lists the options of one):
"""

OPTIONS = [
    ("  -h, --help", "this text"),
    ("  --version", "versions of the core and of every installed plugin distribution"),
]


def main(argv: list[str] | None = None) -> int:
    """Run one command line.

    Returns:
        The exit code.
    """
    if argv is None:
        argv = sys.argv[1:]
        warnings.showwarning = _show_warning
    try:
        code = int(_dispatch(argv))
        sys.stdout.flush()
        return code
    except JobError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except ForgeError as error:
        print(f"forge-run: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of the output has ended: `forge-run plugins | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show Forge's own warnings without the line of code that raised them, which is of no use to users."""
    ours = Path(filename).is_relative_to(Path(__file__).parents[1])
    text = f"warning: {message}\n" if ours else warnings.formatwarning(message, category, filename, lineno, line)
    (file or sys.stderr).write(text)


def _dispatch(argv: list[str]) -> int:
    first = argv[0] if argv else "--help"
    if first in ("-h", "--help"):
        print(help_text(Catalog.installed()))
        return ExitCode.FINISHED
    if first == "--version":
        print(version_text(Catalog.installed()))
        return ExitCode.FINISHED
    catalog = Catalog.installed()
    name, rest = ("run", argv) if _is_job(first) else (first, argv[1:])
    return catalog.load_offer(find_command(catalog, name))(rest)


def _is_job(argument: str) -> bool:
    """Whether a command line starts with a job file, or an override, rather than with a command."""
    return argument.endswith(".toml") or argument.startswith("-") or Path(argument).is_file()


def help_text(catalog: Catalog) -> str:
    """Usage and every installed command. Imports no plugin."""
    return f"{USAGE}{columns(help_rows(catalog))}\n\noptions:\n{columns(OPTIONS)}"


def version_text(catalog: Catalog) -> str:
    """One line for the core, and one for each other distribution that offers something to Forge."""
    distributions = {offer.distribution.name: offer.distribution for offer in catalog.all_offers()}
    ordered = sorted(distributions.values(), key=lambda distribution: (distribution.name != CORE, distribution.name))
    return "\n".join(str(distribution) for distribution in ordered)
