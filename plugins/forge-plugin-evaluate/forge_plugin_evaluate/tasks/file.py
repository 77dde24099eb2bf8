"""The task `file`: items from a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import ge, min_len

from forge_core.contracts.components import FilePath
from forge_core.contracts.errors import DataError, Problem
from forge_plugin_evaluate.tasks.kinds import Item, TaskComponent

if TYPE_CHECKING:
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job

SHOWN = 5
"""Bad lines that an error names."""


@frozen(kw_only=True)
class File(TaskComponent):
    """Items from a file with one JSON object on each line: `context` (text), `choices` (texts) and `answer` (index).

    Other keys of a line are not read. Empty lines are skipped.
    """

    path: FilePath = field(validator=min_len(1))
    """The file, from the working directory."""
    limit: int = field(default=0, validator=ge(0))
    """Number of items, always the same, spread evenly over the file; 0: all."""

    @property
    def _default_name(self) -> str:
        return Path(self.path).name.split(".")[0]

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Reads the whole file, so that every bad line shows when the job is checked."""
        try:
            self.load()
        except DataError as error:
            yield Problem("path", str(error))

    def load(self) -> Sequence[Item]:
        """Returns `limit` items at equal distances in the file, or all of them."""
        items = read_items(Path(self.path))
        count = min(self.limit or len(items), len(items))
        # Spread over the file, which may be sorted by subject
        return [items[number * len(items) // count] for number in range(count)]


def read_items(path: Path) -> list[Item]:
    """Read all items of a file.

    Raises:
        DataError: the file cannot be read, has no items, or has lines that are none; it names the first of them.
    """
    items: list[Item] = []
    wrong: list[str] = []
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            try:
                items.append(_item(line))
            except ValueError as error:
                wrong.append(f"{path}:{number}: {error}")
    if wrong:
        more = f"; and {len(wrong) - SHOWN} more lines" if len(wrong) > SHOWN else ""
        raise DataError("; ".join(wrong[:SHOWN]) + more)
    if not items:
        raise DataError(f"{path} has no items; write one JSON object a line, with context, choices and answer")
    return items


def _lines(path: Path) -> Iterator[str]:
    try:
        # Not `splitlines`, which also breaks at characters that JSON allows inside of strings, such as U+2028.
        yield from path.read_text("utf-8").split("\n")
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 ({error})"
        raise DataError(f"{path} cannot be read: {reason}") from error


def _item(line: str) -> Item:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(value, dict):
        raise ValueError(f"is {_kind(value)}, not an object with context, choices and answer")
    if missing := [key for key in ("context", "choices", "answer") if key not in value]:
        raise ValueError(f"lacks {' and '.join(missing)}")
    context, choices, answer = value["context"], value["choices"], value["answer"]
    if not isinstance(context, str):
        raise ValueError(f"context is {_kind(context)}, not text")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("choices is not a list of at least one text")
    if blank := [number for number, choice in enumerate(choices) if not choice.strip()]:
        raise ValueError(f"choice {blank[0]} is blank")
    # `true` of JSON is an int in Python
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise ValueError(f"answer is {answer!r}, not a number from 0 to {len(choices) - 1}")
    return Item(context, tuple(choices), answer)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
