"""Command lines of commands that take a job: files, overrides, and the command's own options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def positive(text: str) -> int:
    """Type of an argument that is at least 1, for `add_argument(type=…)`."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def parse_job_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str], files: str = "job files, layered from left to right"
) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Parse `[OPTIONS] JOB.toml … [--section.key=value …]`.

    Every argument that starts with `--` and is no option of the parser is an override.

    Args:
        parser: has the command's own options; files and overrides are added.
        argv: the arguments after the command.
        files: description of the job files, for the help.

    Returns:
        The options, the job files, and the overrides, in order.
    """
    parser.allow_abbrev = False  # `--res=never` is no `--resume`: it may be a key of a plugin
    parser.add_argument("files", nargs="+", metavar="JOB.toml", help=files)
    parser.add_argument_group("overrides", "--section.key=value …: a key of the job, its value written as in TOML")
    options = {option for action in parser._actions for option in action.option_strings}
    # Separated first: argparse does not know the keys of a job, and would take the file after one for its value.
    overrides = [each for each in argv if each.startswith("--") and each.partition("=")[0] not in options]
    rest = [each for each in argv if each not in overrides]
    parsed = parser.parse_args(rest)
    return parsed, parsed.files, overrides
