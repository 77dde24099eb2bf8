"""For commands: command lines with job files, overrides and own options."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Sequence
from inspect import cleandoc
from pathlib import Path

from attrs import fields, fields_dict

from forge_core.config.tree import renamed
from forge_core.contracts.errors import SURE, JobError, did_you_mean
from forge_core.job import Job

EXAMPLES = "examples:"
TABLE = re.compile(
    rf"(--)?({'|'.join(f.name for f in fields(Job) if str(f.type).startswith('Mapping'))})\.[^.=]+(=(true)?)?"
)
"""A table whose name the user chooses, such as `--parallel.fsdp`, switched on."""


def positive(text: str) -> int:
    """Type of an argument that is at least 1, for `add_argument(type=…)`."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


class _Help(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            part.replace("\n", "\n  ") if part.startswith(EXAMPLES) else textwrap.fill(part, width)
            for part in cleandoc(text).split("\n\n")
        )


def with_examples(parser: argparse.ArgumentParser, *commands: str) -> None:
    """Show example commands at the end of a parser's help, one per line; options cannot be abbreviated."""
    parser.allow_abbrev = False  # an abbreviation changes its meaning with each new option
    parser.formatter_class, parser.epilog = _Help, "\n".join([EXAMPLES, *commands]).replace("%", "%%")


def parse_job_arguments(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    files: str = "job files, layered from left to right",
    keys: str = "a key of the job, its value written as in TOML",
) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Parse `[OPTIONS] JOB.toml … [--section.key=value …]`: returns options, job files and overrides, in order.

    Overrides may also be written `--section.key value` and `section.key=value`, and `--parallel.NAME` alone, which
    switches a table on with its defaults; any other option that is none of `parser`, which has the command's own, is
    refused by a `JobError`. Job files, described by `files`, are added to a parser without positional arguments; one
    with positional arguments, such as RUN, takes no other files. Help shows overrides as `keys`.
    """
    parser.allow_abbrev = False  # `--res=never` is no `--resume`: it may be a key of a plugin
    if all(action.option_strings for action in parser._actions):
        parser.add_argument("files", nargs="+", metavar="JOB.toml", help=files)
    parser.add_argument_group("overrides", f"--section.key=value …: {keys}")
    takes_value = {option: action.nargs != 0 for action in parser._actions for option in action.option_strings}
    # Separated first: argparse does not know the keys of a job, and would take the file after one for its value.
    own, overrides, rest = list[str](), list[str](), ["/dev/stdin" if word == "-" else word for word in argv]
    while rest:
        word = rest.pop(0)
        key = word.lstrip("-+").partition("=")[0]
        if word.partition("=")[0] in takes_value:
            own += [word, *([rest.pop(0)] if rest and takes_value.get(word) else [])]
        elif word[:1] not in ("-", "+") and ("=" not in word or Path(word).exists()):
            own.append(word)
        elif (word[:2] != "--" and word[0] in "-+") or (
            key.replace("-", "_").isidentifier() and key not in fields_dict(Job)
        ):
            known = did_you_mean(word, takes_value, SURE) or renamed(key) or did_you_mean(word, takes_value)
            meant = f"; did you mean '--{word.lstrip('-+')}'?" if "." in key else known
            raise JobError(f"{word}: unknown option{meant or '; keys of the job are written --section.key=value'}")
        elif TABLE.fullmatch(word) and not (rest and rest[0].startswith("{")):
            overrides.append(f"--{key}={{}}")
        elif "=" not in word and rest and not rest[0].startswith("-") and not rest[0].endswith(".toml"):
            overrides.append(f"{word}={rest.pop(0)}")
        else:
            overrides.append(f"--{word.removeprefix('--')}")  # Hydra's form, without dashes, too
    parsed = parser.parse_args(own)
    return parsed, getattr(parsed, "files", []), overrides
