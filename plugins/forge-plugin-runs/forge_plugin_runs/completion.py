"""`forge-run completion`: completion of commands, options, keys, job files and run folders, in bash, zsh and fish.

For each press of Tab, the shell calls `forge-run completion --line TEXT`, which prints the possible continuations. So a
plugin that was installed a moment ago is completed too, and so are keys of the job file on the line. Parsers belong to
the commands, which are imported when they are called: a command is called, and stopped at the moment at which it would
parse.
"""

from __future__ import annotations

import argparse
import os
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from forge_core.checkpoint.run_folder import JOB
from forge_core.cli.command_line import positive, with_examples
from forge_core.contracts.errors import ExitCode, ForgeError
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import count
from forge_plugin_runs.facts import is_run

SCRIPTS = Path(__file__).parent / "completion_scripts"
HINTS = {
    "bash": "add to ~/.bashrc:  source <(forge-run completion bash)",
    "zsh": "add to ~/.zshrc, after compinit:  source <(forge-run completion zsh)",
    "fish": "forge-run completion fish > ~/.config/fish/completions/forge-run.fish",
}


HEADING = "extend"


def command(argv: list[str]) -> int:
    """Print the completion script for bash, zsh or fish."""
    parser = argparse.ArgumentParser("forge-run completion", description=command.__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("shell", nargs="?", choices=list(HINTS), help="; ".join(HINTS.values()))
    which.add_argument("--line", metavar="TEXT", help="print what may follow this line, as the scripts ask")
    with_examples(parser, "source <(forge-run completion bash)")
    options = parser.parse_args(argv)
    if not options.shell and options.line is None:
        parser.error(f"name the shell: {', '.join(HINTS)}")
    if options.shell:
        print((SCRIPTS / f"{options.shell}.sh").read_text(encoding="utf-8"), end="")
    else:
        print("\n".join(completions(options.line)))
    return ExitCode.FINISHED


def completions(line: str) -> list[str]:
    """Returns what may stand in place of the last word of a command line, which begins with the program."""
    words = _words(line)
    *before, word = words[1:] if len(words) > 1 else [""]
    catalog = Catalog.installed()
    # A job with mistakes has no continuations; an error here would end up on the command line
    with suppress(ForgeError):
        candidates = _candidates(before, word, catalog)
        return sorted(dict.fromkeys(each for each in candidates if each.startswith(word)))
    return []


def _words(line: str) -> list[str]:
    """Returns the words of a line, the last one empty if the line ends with a space."""
    try:
        words = shlex.split(line)
    except ValueError:  # a quote is still open
        words = line.split()
    return [*words, ""] if line.endswith((" ", "\t")) or not words else words


def _candidates(before: Sequence[str], word: str, catalog: Catalog) -> Iterable[str]:
    if not before:
        options = ("--help", "--version") if word.startswith("-") else ()
        # A group once, and not with each of its members
        first_words = {type_.partition(" ")[0] for type_ in catalog.types("command")}
        return [*first_words, *options, *_paths(word, "JOB.toml")]
    is_job = before[0].endswith(".toml") or before[0].startswith("-")
    name, rest = ("run", before) if is_job else (before[0], before[1:])
    pair = " ".join(before[:2])
    if catalog.matching("command", pair):  # one of a group
        name, rest = pair, before[2:]
    types = catalog.types("command") if len(before) == 1 else []
    members = [type_.partition(" ")[2] for type_ in types if type_.startswith(f"{name} ")]
    parser = _parser(name, rest, catalog)
    return members if parser is None else [*members, *_of_command(name, parser, rest, word, catalog)]


def _of_command(
    name: str, parser: argparse.ArgumentParser, rest: Sequence[str], word: str, catalog: Catalog
) -> Iterable[str]:
    parser, rest = _of_action(parser, rest)
    if name == "explain":
        return [each.removeprefix("--").rstrip("=.") for each in _JobKeys((), catalog).names(f"--{word}")]
    if rest and rest[-1] == "--kind":
        return catalog.types("kind")
    takes_job = any(action.metavar == "JOB.toml" for action in parser._actions) or name == "resume"
    return _after(parser, rest, word, _JobKeys(rest, catalog) if takes_job else None)


# --- the parser of a command -----------------------------------------------------------------------------------------


class _Parses(BaseException):
    """A command has made its parser, and is about to use it. No `Exception`: no command catches it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def _parser(name: str, rest: Sequence[str], catalog: Catalog) -> argparse.ArgumentParser | None:
    """Returns the parser of a command; None if it makes none at once."""

    def parse(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _Parses(parser)

    offers = catalog.matching("command", name)
    if len(offers) != 1:  # nothing of this name, or several distributions offer it
        return None
    function = catalog.load_offer(offers[0])
    # Commands print errors of their arguments, which do not belong into a completion
    with patch.object(argparse.ArgumentParser, "parse_known_args", parse), redirect_stderr(StringIO()):
        try:
            # The command runs up to its parser: commands parse their arguments before they do anything else
            function(list(rest))
        except _Parses as caught:
            return caught.parser
        except SystemExit:
            return None
    return None


def _of_action(parser: argparse.ArgumentParser, rest: Sequence[str]) -> tuple[argparse.ArgumentParser, Sequence[str]]:
    """Returns the parser of the action on the line (`checkpoints RUN verify`), and the words after it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for number, word in enumerate(rest):
                if word in action.choices:
                    return action.choices[word], rest[number + 1 :]
    return parser, rest


def _after(parser: argparse.ArgumentParser, rest: Sequence[str], word: str, keys: _JobKeys | None) -> Iterator[str]:
    """Yields what a parser takes next: the value of an option, an option, a key, or a further argument."""
    options = {name: action for action in parser._actions for name in action.option_strings}
    option, is_assigned, _ = word.partition("=")
    if is_assigned:
        # An option of the command comes before a key of the job of the same name
        values = options.get(option)
        found = _values(values, word.partition("=")[2]) if values else keys.values(option) if keys else ()
        yield from (f"{option}={value}" for value in found)
    elif rest and (previous := options.get(rest[-1])) and previous.nargs != 0:
        yield from _values(previous, word)
    elif word.startswith("-"):
        yield from (name for name in options if name.startswith("--") or word == name)
        yield from keys.names(word) if keys else ()
    else:
        given = [each for number, each in enumerate(rest) if not _is_option(each, rest[:number], options)]
        yield from _values(_positional(parser, len(given)), word)


def _is_option(word: str, before: Sequence[str], options: Mapping[str, argparse.Action]) -> bool:
    """Whether a word of the line is an option or the value of one."""
    previous = options.get(before[-1]) if before else None
    return word.startswith("-") or (previous is not None and previous.nargs != 0)


def _positional(parser: argparse.ArgumentParser, number: int) -> argparse.Action | None:
    """Returns the argument that comes after `number` others."""
    actions = [action for action in parser._actions if not action.option_strings]
    # Nothing comes after an argument that takes several words
    many = next((i for i, action in enumerate(actions) if action.nargs in ("*", "+")), len(actions))
    return actions[min(number, many)] if min(number, many) < len(actions) else None


def _values(action: argparse.Action | None, word: str) -> Iterable[str]:
    if action is None:
        return ()
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    # Numbers have no continuations; without this, paths would be offered for them
    if action.type in (int, float, count, positive):
        return ()
    metavar = str(action.metavar or action.dest)
    literals = [each for each in metavar.split("|") if each.islower() and "|" in metavar]  # auto|never|PATH
    return [*literals, *_paths(word, metavar)]


def _paths(word: str, what: str) -> Iterator[str]:
    """Yields paths that begin with `word`: job files, run folders, or any paths; folders end with a slash."""
    folder, _, name = word.rpartition("/")
    above, what = f"{folder}/" if "/" in word else "", what.upper()
    with suppress(OSError), os.scandir(os.path.expanduser(above) or ".") as entries:
        for entry in entries:
            if entry.name.startswith(name) and (name.startswith(".") or not entry.name.startswith(".")):
                if entry.is_dir():
                    # A run folder is a complete word; only a folder that may contain runs gets a slash
                    is_end = what.startswith("RUN") and is_run(Path(entry.path))
                    yield f"{above}{entry.name}{'' if is_end else '/'}"
                elif not what.startswith("RUN") and (what != "JOB.TOML" or entry.name.endswith(".toml")):
                    yield f"{above}{entry.name}"


# --- keys of a job ---------------------------------------------------------------------------------------------------


class _JobKeys:
    """Keys of the job on a command line, of whose components only those are known that its files or words name."""

    def __init__(self, rest: Sequence[str], catalog: Catalog) -> None:
        self._catalog, self._job = catalog, dict[str, Any]()
        for path in (Path(word) for word in rest if not word.startswith("-")):
            file = path / JOB if path.is_dir() else path
            with suppress(OSError, ValueError):
                _lay(self._job, tomllib.loads(file.read_text(encoding="utf-8")))
        for word in rest:
            key, _, value = word.removeprefix("--").partition("=")
            if key.endswith(".type"):
                # Overrides come after files, as in the job itself
                _lay(self._job, _nested(key.split("."), value.strip("'\"")))

    def names(self, word: str) -> Iterator[str]:
        """Yields the keys and tables one level below the table that `word` (`--train.st`) names so far."""
        *path, _ = word.removeprefix("--").split(".")
        above = "".join(f"{part}." for part in path)
        for name, is_table in self._level(path):
            yield f"--{above}{name}{'.' if is_table else '='}"

    def values(self, option: str) -> Iterator[str]:
        """Yields the values of a key that has few: choices, true and false, types of a kind."""
        from forge_core.config import field_types as types

        *path, name = option.removeprefix("--").split(".")
        table = self._table(path)
        if name == "type":
            yield from self._types(path)
        for key in self._keys(table):
            if key.name == name:
                yield from map(str, types.choices(key.type))
                yield from ("true", "false") if bool in types.members(key.type) else ()

    def _level(self, path: Sequence[str]) -> Iterator[tuple[str, bool]]:
        from forge_core.config import field_types as types

        table = self._table(path)
        if isinstance(table, dict):  # tables of named components: [parallel.NAME]
            yield from ((name, True) for name in table)
        for key in self._keys(table):
            members = types.members(key.type)
            is_table = any(types.is_component(m) or types.is_section(m) or types.is_mapping(m) for m in members)
            yield key.name, is_table
        if path and self._types(path):
            yield "type", False

    def _keys(self, table: Any) -> Sequence[Any]:
        from forge_kit.tools.documented_keys import keys_of

        return keys_of(table) if isinstance(table, type) else ()

    def _table(self, path: Sequence[str]) -> Any:
        """The class of the table at `path`, or the names below it where those are free; None if it is not known."""
        return self._step(path)[0]

    def _types(self, path: Sequence[str]) -> Sequence[str]:
        kind = self._step(path)[1]
        return self._catalog.types(kind) if kind else ()

    def _step(self, path: Sequence[str]) -> tuple[Any, str]:
        """The class or names at a path, and the kind of the component there."""
        from forge_core.config import field_types as types
        from forge_core.job import Job

        kind, value = "", self._job
        table: Any = Job
        entries: Any = None
        for part in path:
            if entries is not None:  # a name of one's own, or the number in an array
                field_type = entries
            else:
                found = [key for key in self._keys(table) if key.name == part]
                if not found:
                    return None, ""
                field_type = found[0].type
            value = _below(value, part)
            default = "" if entries is not None else getattr(found[0].default, "type", "")
            table, kind, entries = self._resolve(types.members(field_type), value, str(default) or part)
            if entries is not None and table is None:
                table = {str(name): None for name in _names(value)} | dict.fromkeys(self._named(entries))
        return table, kind

    def _named(self, entries: Any) -> Sequence[str]:
        from forge_core.config import field_types as types

        return self._catalog.types(entries.kind) if types.is_component(entries) else ()

    def _resolve(self, members: Iterable[Any], value: Any, default: str) -> tuple[Any, str, Any]:
        """The class, the kind and the type of entries of a field's type; `default` is the type of a component."""
        from forge_core.config import field_types as types

        for member in members:
            if types.is_component(member):
                type_ = str(_below(value, "type") or default)
                # A type that is misspelt or not installed: loading it would end the whole completion
                known = type_ in self._catalog.types(member.kind) or "/" in type_
                return self._catalog.load(member.kind, type_) if known else None, member.kind, None
            if types.is_section(member):
                return member, "", None
            if types.is_mapping(member) or (types.is_array(member) and not types.is_fixed(member)):
                return None, "", types.item_type(member)
        return None, "", None


def _names(value: Any) -> Iterable[Any]:
    return range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()


def _below(value: Any, part: str) -> Any:
    if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
        return value[int(part)]
    return value.get(part, {}) if isinstance(value, dict) else {}


def _lay(under: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(under.get(key), dict):
            _lay(under[key], value)
        else:
            under[key] = value


def _nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    return {path[0]: value if len(path) == 1 else _nested(path[1:], value)}
