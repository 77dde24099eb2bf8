"""Commands that prose names between backticks: whether they exist, with their actions, options and keys.

Blocks are run, or compared with what commands print; the commands within a sentence are not. Words in capitals, `…` and
the like stand for something, and end what can be looked up.
"""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from collections.abc import Iterator

from parsers import OFFERS, parsed, parsers

from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import Catalog
from forge_plugin_author.explain import find

FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`(forge-run [^`]+)`(?!`)")
OVERRIDE = re.compile(r"--([a-z_]\w*(?:\.\w+)*\.[a-z_]\w*)")
OWN_TABLES = ("cluster", "sae")
"""Keys of a command's own file, which are no keys of a job."""


@functools.cache
def parser_of(command: str) -> argparse.ArgumentParser | None:
    """The parser of a command; None if there is none."""
    [offer] = [offer for offer in OFFERS if offer.type == command] or [None]
    return parsed(offer, []).parser if offer else None


def commands_in(text: str) -> list[str]:
    """Returns the commands between backticks, without those in blocks."""
    prose = FENCE.sub("", text)
    return [" ".join(match.split()) for match in INLINE.findall(prose)]


def faults_of(line: str) -> Iterator[str]:
    """Yields what a command line has that does not exist."""
    words = shlex.split(line.partition(" | ")[0].partition(" > ")[0].replace("'", ""))[1:]
    name, rest = named(words)
    if any(word == "…" or word.isupper() for word in name.split()) or name in ("--help", "--version"):
        return
    parser = parser_of(name)
    if parser is None:
        groups = {offer.type.partition(" ")[0] for offer in OFFERS}
        # A group alone lists its commands
        if name.partition(" ")[0] not in groups or words[1:]:
            yield f"{line}: no command {name!r}"
        return
    every = list(parsers(parser))
    # By the last word of their programs: `forge-run checkpoints RUN diff`
    actions = {each.prog.rpartition(" ")[2]: each for each in every[1:]}
    chosen = [actions[word] for word in rest if word in actions]
    options = {option for each in (chosen or every) for option in each._option_string_actions}
    # What follows `--` belongs to another program
    for word in rest[: rest.index("--")] if "--" in rest else rest:
        option = word.partition("=")[0]
        if key := OVERRIDE.fullmatch(option):
            yield from faults_of_key(line, key[1])
        elif option.startswith("--") and option not in options:
            yield f"{line}: {name} has no option {option}"


def named(words: list[str]) -> tuple[str, list[str]]:
    """Name and further words of a command: one of a group has two, and a job file is the command `run`."""
    known = {offer.type for offer in OFFERS}
    if " ".join(words[:2]) in known:
        return " ".join(words[:2]), words[2:]
    if words[0] in known:
        return words[0], words[1:]
    if words[0].endswith(".toml") or (words[0].startswith("--") and words[0] not in ("--help", "--version")):
        return "run", words
    if words[0] in ("--help", "--version"):
        return words[0], []
    return " ".join(words[:2]), words[2:]


def faults_of_key(line: str, key: str) -> Iterator[str]:
    """Yields that a job has no such key."""
    if key.partition(".")[0] in OWN_TABLES:
        return
    try:
        find(key.removesuffix(".type"), catalog())
    except JobError as error:
        yield f"{line}: {error}"


@functools.cache
def catalog() -> Catalog:
    return Catalog.installed()
