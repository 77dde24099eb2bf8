"""The raw job before it has types: TOML files layered left to right, then overrides, in one tree.

Its tables, arrays and scalars remember where they were written, so that a message can name the file and line.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any

from attrs import define, frozen

from forge_core.config.lines import KeyPath, find_lines, split_key
from forge_core.contracts.errors import LEFT_OUT, SURE, JobError, Problem, did_you_mean

Source = str | Path | Mapping[str, Any]
"""A layer of a job: a path, a text of TOML (a string with a line break), or a table made in Python."""
Overrides = str | Iterable[str] | Mapping[str, Any]
"""`section.key=value`, one or several, or values made in Python by `section.key`."""

_POSITION = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
SHOWN = 60  # characters of a flag that error messages show


@frozen
class Origin:
    """Where a value was written: a line of a file, or a command-line flag."""

    source: str
    line: int = 0
    """Counted from 1; 0 where it is not known."""
    layer: int = 0
    """Rank in the order of precedence: files from left to right, then flags."""

    @property
    def is_flag(self) -> bool:
        """Whether the source is a command-line flag (`--section.key`) and not a file."""
        return self.source.startswith("--")

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@define
class Node:
    """One value of the tree. `value` is a dict of nodes, a list of nodes, or a scalar."""

    value: Any
    origin: Origin
    replaced: Node | None = None
    """The node of an earlier layer that this one replaced."""

    def plain(self) -> Any:
        """The value without origins."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return [node.plain() for node in self.value] if isinstance(self.value, list) else self.value

    def child(self, key: str) -> Node | None:
        """Entry of a table, or of an array by index."""
        if isinstance(self.value, dict):
            return self.value.get(key)
        if isinstance(self.value, list) and key.isdecimal() and int(key) < len(self.value):
            return self.value[int(key)]
        return None

    def along(self, path: str) -> Iterator[Node]:
        """The nodes on the way along a dotted path, this one first, until one does not exist."""
        yield self
        parts = path.split(".") if path else []
        for end in range(len(parts), 0, -1):  # a quoted key may itself have dots: the longest that exists
            child = self.child(".".join(parts[:end]))
            if child is not None:
                yield from child.along(".".join(parts[end:]))
                return

    def innermost(self, path: str) -> Node:
        """The node at `path`, or else the innermost table above it."""
        return list(self.along(path))[-1]


def annotate(value: Any, lines: dict[KeyPath, int], origin: Origin, path: KeyPath = ()) -> Node:
    """The tree of a value from `tomllib`. A key whose line is not known takes the line of its table."""
    origin = Origin(origin.source, lines.get(path, origin.line), origin.layer)
    if isinstance(value, dict):
        return Node({key: annotate(item, lines, origin, (*path, key)) for key, item in value.items()}, origin)
    if isinstance(value, list):
        return Node([annotate(item, lines, origin, (*path, index)) for index, item in enumerate(value)], origin)
    return Node(value, origin)


def merge(base: Node, layer: Node) -> Node:
    """`layer` over `base`: tables merge deeply, anything else replaces."""
    if not (isinstance(base.value, dict) and isinstance(layer.value, dict)):
        return Node(layer.value, layer.origin, replaced=base)
    merged = dict(base.value)
    for key, node in layer.value.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    return Node(merged, layer.origin, replaced=base)


def read_job(sources: Sequence[Source], overrides: Overrides = ()) -> tuple[Node, list[Problem]]:
    """The tree of sources and overrides, and the problems of overrides that name a key.

    A `JobError` lists every file that is missing or is not TOML, and malformed overrides.
    """
    root, unreadable = Node({}, Origin("job")), []
    for layer, source in enumerate(sources):
        try:
            root = merge(root, _read_source(source, layer))
        except JobError as error:
            unreadable += error.problems
    root.origin = Origin(" + ".join(map(_name, sources)) or "job")
    problems = apply_overrides(root, overrides, len(sources))
    if unreadable:  # then an override may miss its table only because that is in such a file
        raise JobError([*unreadable, *(problem for problem in problems if not problem.path)])
    return root, problems


def _name(source: Source) -> str:
    if isinstance(source, Mapping):
        return "table"
    return "text" if isinstance(source, str) and "\n" in source else str(source)


def _read_source(source: Source, layer: int) -> Node:
    if isinstance(source, Mapping):
        return annotate(_plain(source), {}, Origin(_name(source), 0, layer))
    if not isinstance(source, str | Path):
        raise TypeError(
            "a job is a path, a text of TOML (with a line break) or a table (a dict), "
            f"not {type(source).__name__} {source!r:.60}"
        )
    return read_text(str(source), "text", layer) if _name(source) == "text" else _read_file(Path(source), layer)


def _plain(value: Any) -> Any:
    """A value made in Python as `tomllib` would return it: tables as dicts, arrays as lists, paths as strings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def _read_file(path: Path, layer: int) -> Node:
    try:
        # Not in text mode, which would turn a lone \r into a new line too: TOML refuses that.
        return read_text(path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n"), str(path), layer)
    except FileNotFoundError:
        others = [str(other) for other in path.parent.glob("*.toml")]
        hint = "; a text of TOML has a line break" if "=" in str(path) else did_you_mean(str(path), others, SURE)
        raise JobError.at("", f"no such file{hint}", str(path)) from None
    except OSError as error:
        raise JobError.at("", f"cannot be read: {error.strerror}", str(path)) from None
    except UnicodeDecodeError as error:
        utf_16 = "; it is UTF-16: save it as UTF-8" * (error.object[:2] in (b"\xff\xfe", b"\xfe\xff"))
        raise JobError.at(
            "", f"not UTF-8 text: byte {error.object[error.start]:#04x} at offset {error.start}{utf_16}", str(path)
        ) from None


def read_text(text: str, name: str, layer: int = 0) -> Node:
    """The tree of a text; raises `JobError` where it is not TOML, with line and column."""
    try:
        return annotate(tomllib.loads(text), find_lines(text), Origin(name, 0, layer))
    except tomllib.TOMLDecodeError as error:
        line, column, reason = _position(text, str(error))
        other = "JSON" if text.lstrip()[:1] == "{" else "YAML" if re.match(r"(---|- |[\w-]+:\s)", text) else ""
        message = f"looks like {other}, and jobs are TOML" if other else "not valid TOML"
        rules = hints("syntax")["rules"] * (not other)
        reason += next((f"; {hint}" for rule, hint in rules if re.search(rule, text.split("\n")[line - 1])), "")
        raise JobError.at("", f"{message}: {reason[:1].lower()}{reason[1:]}", f"{name}:{line}:{column}") from None


def hints(table: str) -> dict[str, Any]:
    """A table of `hints.toml`: what users of other programs probably meant."""
    return tomllib.loads(Path(__file__).with_name("hints.toml").read_text(encoding="utf-8"))[table]


def renamed(name: str, has: Callable[[str], bool] = bool) -> str:
    """The end of a message: what a key of other trainers is called here; empty if it is not known.

    `has`: whether the job has a key that the hint names (`optimizer.betas`); by default, it is taken to have it.
    """
    meant = next((each[name] for each in hints("keys").values() if name in each), "")
    code = meant.split("`")[1] if meant.startswith("`") else ""
    lacks = "." in code and not has(code.split()[0])
    return f"; in Forge it is {meant.replace('`', '')}" if meant and not lacks else ""


def _position(text: str, message: str) -> tuple[int, int, str]:
    """Line and column that a message of `tomllib` ends in, and the rest of it."""
    position = _POSITION.search(message)
    rest = _POSITION.sub("", message)
    if position and position[1]:
        return int(position[1]), int(position[2]), rest
    return text.count("\n") + 1, len(text) - text.rfind("\n"), rest  # at the end of the document


# --- overrides ---------------------------------------------------------------------------------------------------


def flag(path: str, toml: str) -> str:
    """The command-line flag that sets a key, quoted for a shell."""
    return f"--{path}={shlex.quote(toml)}"


def apply_overrides(root: Node, overrides: Overrides, layer: int) -> list[Problem]:
    """Set keys of the tree in place, in layers from `layer` on; returns why some cannot be set."""
    flags = [overrides] if isinstance(overrides, str) else overrides
    entries: Iterable[Any] = flags.items() if isinstance(flags, Mapping) else flags
    return [problem for number, each in enumerate(entries, layer) for problem in apply_override(root, each, number)]


def apply_override(root: Node, override: str | tuple[str, Any], layer: int) -> list[Problem]:
    """Set one key of the tree in place (`--optimizer.lr=1e-3`, `--data.sources.0.weight=2`), by a flag or a pair.

    Missing tables on the way are created: a misspelt one is reported later, as an unknown key. Returns why it cannot be
    applied, if so: with a path if a key is at fault, without if the flag itself is.
    """
    text = f"--{override.removeprefix('--')}" if isinstance(override, str) else override[0]
    origin = Origin(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…", 0, layer)
    try:
        path, value = parse_override(text) if isinstance(override, str) else (_key_path(text), _plain(override[1]))
        _put(root, path, annotate(value, {}, origin))
    except JobError as error:
        return [Problem(problem.path, problem.message, str(origin)) for problem in error.problems]
    return []


def parse_override(text: str) -> tuple[list[str], Any]:
    """Key path and value of `--a.b=value`; raises `JobError` where the value is missing or the key is not one."""
    key, equals, raw = text.removeprefix("--").partition("=")
    if not equals:
        raise JobError(f"there is no value; write {text}=VALUE (to switch something on, =true)")
    return _key_path(key), _parse_value(raw)


def _key_path(key: str) -> list[str]:
    try:
        return split_key(key)
    except tomllib.TOMLDecodeError:
        raise JobError(f"{key!r} is not a key; write --section.key=value, or --data.sources.0.path=value") from None


def _parse_value(raw: str) -> Any:
    """The value as TOML, or else as a bare string: `--train.precision=bf16` needs no quotes."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    return parsed["value"] if list(parsed) == ["value"] else raw  # more keys: a text that continues like TOML


def _put(root: Node, path: list[str], node: Node) -> None:
    parent: Any = root
    for depth, key in enumerate(path[:-1], start=1):
        if isinstance(parent.value, dict):
            parent = parent.value.setdefault(key, Node({}, node.origin))
        else:
            parent = parent.value[_index(parent, key, path[: depth - 1])]
        if not isinstance(parent.value, dict | list):
            raise JobError.at(
                ".".join(path), f"{'.'.join(path[:depth])} is {parent.value!r} ({parent.origin}), not a table"
            )
    node.replaced = parent.child(path[-1])
    parent.value[path[-1] if isinstance(parent.value, dict) else _index(parent, path[-1], path[:-1])] = node


def _index(parent: Node, key: str, path: list[str]) -> int:
    where, values = ".".join(path), parent.value
    if not key.isdecimal():
        raise JobError.at(f"{where}.{key}", f"{where} is an array: {key!r} is no index into it")
    if int(key) >= len(values):
        raise JobError.at(f"{where}.{key}", f"there is no entry {key}; {where} has {len(values)}, numbered from 0")
    return int(key)


def clip(root: Node, problems: Iterable[Problem]) -> Iterator[str]:
    """Make keys fit a shorter run (`--train.steps=20`), in place, where their problem has `fits`; yields what changed.

    Only keys of layers below the one that sets `train.steps`: a layer that contradicts itself is a mistake.
    """
    steps = root.innermost("train.steps")
    # All paths first: an entry that is left out changes the number of those after it
    for problem, nodes in [(problem, [*root.along(problem.path)]) for problem in problems]:
        origin, (table, _, key) = nodes[-1].origin, problem.path.rpartition(".")
        is_below = origin.layer < steps.origin.layer and not (origin.is_flag and steps.origin.is_flag)
        if is_below and problem.fits is LEFT_OUT:
            array, entry = next(pair for pair in reversed([*pairwise(nodes)]) if isinstance(pair[0].value, list))
            array.value[:] = [node for node in array.value if node is not entry]
            yield f"{origin}: {problem.path}: left out: {problem.message}"
        elif is_below and problem.fits is not None:
            root.innermost(table).value[key] = annotate(problem.fits, {}, origin)
            yield f"{origin}: {problem.path}: clipped to {problem.fits} ({steps.origin}): {problem.message}"
