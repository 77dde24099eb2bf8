"""Reading: TOML files layered left to right, then overrides, into one tree that knows where each value came from."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from forge_core.config.lines import find_lines
from forge_core.config.overrides import apply_override
from forge_core.config.tree import Node, Origin, annotate, merge
from forge_core.contracts.errors import SURE, JobError, Problem, did_you_mean

_POSITION = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def read_job(paths: Sequence[str | Path], overrides: Iterable[str] = ()) -> tuple[Node, list[Problem]]:
    """The merged tree of files and overrides, and what is wrong with the overrides.

    Raises:
        JobError: a file is missing or is not TOML. Tells of every such file, and of malformed overrides.
    """
    root, unreadable = Node({}, Origin("job")), []
    for layer, path in enumerate(paths):
        try:
            root = merge(root, read_file(path, layer))
        except JobError as error:
            unreadable += error.problems
    root.origin = Origin(" + ".join(map(str, paths)) or "job")
    applied = [apply_override(root, text, layer) for layer, text in enumerate(overrides, start=len(paths))]
    problems = [problem for problem in applied if problem is not None]
    if unreadable:
        raise JobError([*unreadable, *(problem for problem in problems if not problem.path)])
    return root, problems


def read_file(path: str | Path, layer: int = 0) -> Node:
    """The tree of one file.

    Raises:
        JobError: it cannot be read, or is not TOML; names line and column.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        return annotate(tomllib.loads(text), find_lines(text), Origin(str(path), 0, layer))
    except FileNotFoundError:
        others = [str(other) for other in Path(path).parent.glob("*.toml")]
        raise _fault(str(path), f"no such file{did_you_mean(str(path), others, SURE)}") from None
    except OSError as error:
        raise _fault(str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise _fault(str(path), f"not UTF-8 text: byte {byte:#04x} at offset {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise _syntax_fault(str(path), text, str(error)) from None


def _syntax_fault(source: str, text: str, message: str) -> JobError:
    position = _POSITION.search(message)
    line, column = position.groups() if position else (None, None)
    if line is None:
        line, column = text.count("\n") + 1, len(text) - text.rfind("\n")
    reason = _POSITION.sub("", message)
    return _fault(f"{source}:{line}:{column}", f"not valid TOML: {reason[:1].lower()}{reason[1:]}")


def _fault(origin: str, message: str) -> JobError:
    return JobError([Problem("", message, origin)])
