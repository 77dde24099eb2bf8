"""For commands: command lines with job files, overrides and own options, and text in columns."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from inspect import cleandoc

WIDTH = 100
EXAMPLES = "examples:"


def positive(text: str) -> int:
    """Type of an argument that is at least 1, for `add_argument(type=…)`."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


class _Help(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = (
            part if part.startswith(EXAMPLES) else textwrap.fill(part, width) for part in cleandoc(text).split("\n\n")
        )
        return "\n\n".join(parts)


def with_examples(parser: argparse.ArgumentParser, *commands: str) -> None:
    """Show example commands at the end of a parser's help, each on a line of its own."""
    parser.formatter_class, parser.epilog = _Help, "\n  ".join([EXAMPLES, *commands]).replace("%", "%%")


def parse_job_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str], files: str = "job files, layered from left to right"
) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Parse `[OPTIONS] JOB.toml … [--section.key=value …]`: returns options, job files and overrides, in order.

    Every argument that starts with `--` and is no option of `parser`, which has the command's own, is an override.
    Files, which the help describes by `files`, and overrides are added to the parser.
    """
    parser.allow_abbrev = False  # `--res=never` is no `--resume`: it may be a key of a plugin
    parser.add_argument("files", nargs="+", metavar="JOB.toml", help=files)
    parser.add_argument_group("overrides", "--section.key=value …: a key of the job, its value written as in TOML")
    options = {option for action in parser._actions for option in action.option_strings}
    # Separated first: argparse does not know the keys of a job, and would take the file after one for its value.
    overrides = [each for each in argv if each.startswith("--") and each.partition("=")[0] not in options]
    parsed = parser.parse_args([each for each in argv if each not in overrides])
    return parsed, parsed.files, overrides


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows with aligned columns; the last column is as wide as it needs."""
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    lines = ("".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph in lines of moderate width."""
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
