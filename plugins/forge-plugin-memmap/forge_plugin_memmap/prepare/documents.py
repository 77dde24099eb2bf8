"""Parts of the input as workers receive them, the texts in them, and reasons to drop something."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from attrs import define, field, frozen

Reason = Literal["empty", "not UTF-8", "not JSON", "not an object", "no field", "not a string"]

BLOCK = 1 << 20
"""Bytes of an input that are read at a time, about. The result does not depend on it."""
PIECE_CHARACTERS = 1 << 22
"""A longer document is encoded in pieces of about this size, to bound memory."""
EXAMPLES = 3
"""Most places that are recorded for each reason."""


@frozen
class Fields:
    """Keys or columns that are read."""

    text: str = "text"
    """The key or column that holds the text."""
    kept: tuple[str, ...] = ()
    """Those whose values are kept with the document, where it has them."""


class Place(NamedTuple):
    """Where a document lies: `data/a.jsonl:17`."""

    name: str
    """Of the file."""
    number: int = 0
    """Of the line or row, from 1; 0: the file is one document."""
    after: int = 0
    """Byte of the file from which lines are counted. Where another part has the lines before it, the number in the
    file is not known yet."""

    def __str__(self) -> str:
        number = f":{self.number}" if self.number else ""
        return f"{self.name}{number} from byte {self.after}" if self.after else f"{self.name}{number}"


class Text(NamedTuple):
    """A document, or a piece of one."""

    where: Place
    text: str
    size: int
    """Bytes in UTF-8."""
    is_last: bool = True
    """Whether the document ends with it."""
    is_first: bool = True
    """Whether the document begins with it."""
    kept: tuple[bytes, ...] = ()
    """Values of `Fields.kept` in UTF-8, empty where there is none; empty as a whole if there is none at all."""


class Drop(NamedTuple):
    """A file, line or row that yields no document."""

    where: Place
    reason: Reason
    detail: str


class Item(Protocol):
    """A part of the input, as it was read. It is parsed where it is encoded, in a worker."""

    def documents(self) -> Iterator[Text | Drop]: ...


@frozen
class Ready:
    """An item that needs no parsing."""

    document: Text | Drop

    def documents(self) -> Iterator[Text | Drop]:
        """Yields the one document, or the reason why it was dropped."""
        yield self.document


class Read(NamedTuple):
    """A part of a file."""

    at: Mapping[str, int]
    """Where it begins, in the terms of its format."""
    passed: int
    """Bytes of the file before it, as they lie on disk."""
    item: Item
    size: int
    """Bytes of text, about."""


@frozen
class Example:
    """Something that was left out."""

    where: str | Place
    detail: str = ""

    @classmethod
    def of(cls, plain: Any) -> Example:
        """The inverse of `plain`."""
        return cls(plain) if isinstance(plain, str) else cls(Place(*plain["line"]), plain["detail"])

    def plain(self) -> Any:
        """As JSON: text, or a table as long as the number of its line is not known."""
        if isinstance(self.where, str) or not self.where.after:
            return str(self)
        return {"line": [*self.where], "detail": self.detail}

    def numbered(self, lines: int) -> Example:
        """Returns it with the number of its line in the file, of which `lines` lie before the part."""
        cut = self.where
        if isinstance(cut, str) or not cut.after:
            return self
        return Example(Place(cut.name, lines + cut.number), self.detail)

    def __str__(self) -> str:
        return f"{self.where} ({self.detail})" if self.detail else str(self.where)


@define
class Dropped:
    """The number of files, lines and rows that were left out, and examples, by reason."""

    counts: Counter[str] = field(factory=Counter)
    examples: dict[str, list[Example]] = field(factory=dict)

    @classmethod
    def of(cls, plain: Mapping[str, Mapping[str, Any]]) -> Dropped:
        """The inverse of `plain`."""
        counts = Counter({reason: entry["count"] for reason, entry in plain.items()})
        return cls(counts, {reason: [*map(Example.of, entry["examples"])] for reason, entry in plain.items()})

    def plain(self) -> dict[str, dict[str, Any]]:
        """Count and examples of each reason, as JSON."""
        examples = {reason: [each.plain() for each in own] for reason, own in self.examples.items()}
        return {r: {"count": n, "examples": examples[r]} for r, n in sorted(self.counts.items())}

    def add(self, drop: Drop) -> None:
        """Counts one, and keeps its place and detail while there are few examples of the reason."""
        self.counts[drop.reason] += 1
        self._note(drop.reason, [Example(drop.where, drop.detail)])

    def merge(self, later: Dropped) -> None:
        """Adds the counts of a later chunk; examples are the first ones in the order of the inputs."""
        self.counts += later.counts
        for reason, examples in later.examples.items():
            self._note(reason, examples)

    def _note(self, reason: str, examples: Iterable[Example]) -> None:
        known = self.examples.setdefault(reason, [])
        known += list(examples)[: EXAMPLES - len(known)]


def pieces(parts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yields pieces of at most `PIECE_CHARACTERS` of a document, each with whether it is the last.

    A piece is cut before the last line break in reach, so that its tokens equal the tokens of the whole document,
    except for the few next to the cut that a tokenizer may join across it. The cuts do not depend on the parts in
    which the document is read.
    """
    text, start = "", 0
    for part in parts:
        # An index into the text, as a slice behind each piece would copy all that follows
        text, start = text[start:] + part, 0
        while len(text) - start > PIECE_CHARACTERS:
            limit = start + PIECE_CHARACTERS
            # From the second character on, so that no piece is empty
            line_break = text.rfind("\n", start + 1, limit)
            end = line_break if line_break > 0 else limit
            yield text[start:end], False
            start = end
    yield text[start:], True


def kept_value(value: Any) -> bytes:
    """Returns a value that is kept with a document, as text in UTF-8; empty for none.

    Text stays as it is; anything else, a number or a table, is kept as JSON.
    """
    if value is None:
        return b""
    if isinstance(value, bytes):
        value = value.decode(errors="backslashreplace")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    # JSON can escape half a surrogate pair: it stays an escape, as an id must not stop the data
    return text.encode(errors="backslashreplace")


def utf8_size(text: str) -> int:
    """Returns the bytes of a text in UTF-8; raises `UnicodeEncodeError` for half a surrogate pair."""
    # ASCII is counted without an encoded copy
    return len(text) if text.isascii() else len(text.encode())
