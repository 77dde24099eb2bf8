"""Parts of the input as workers receive them, the texts in them, and reasons to drop something."""

from __future__ import annotations

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


class CutLine(NamedTuple):
    """A line of a file whose beginning another part has: its number in the file is not known yet."""

    name: str
    number: int
    """Counted from 1 at `after`."""
    after: int
    """Byte of the file."""

    def __str__(self) -> str:
        return f"{self.name}:{self.number} from byte {self.after}"


Where = str | CutLine
"""`data/a.jsonl:17`."""


class Text(NamedTuple):
    """A document, or a piece of one."""

    where: Where
    text: str
    size: int
    """Bytes in UTF-8."""
    is_last: bool = True
    """Whether the document ends with it."""
    is_first: bool = True
    """Whether the document begins with it."""


class Drop(NamedTuple):
    """A file, line or row that yields no document."""

    where: Where
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

    where: Where
    detail: str = ""

    @classmethod
    def of(cls, plain: Any) -> Example:
        """The inverse of `plain`."""
        return cls(plain) if isinstance(plain, str) else cls(CutLine(*plain["line"]), plain["detail"])

    def plain(self) -> Any:
        """As JSON: text, or a table as long as the number of its line is not known."""
        return str(self) if isinstance(self.where, str) else {"line": [*self.where], "detail": self.detail}

    def numbered(self, lines: int) -> Example:
        """Returns it with the number of its line in the file, of which `lines` lie before the part."""
        cut = self.where
        return self if isinstance(cut, str) else Example(f"{cut.name}:{lines + cut.number}", self.detail)

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


def utf8_size(text: str) -> int:
    """Returns the bytes of a text in UTF-8; raises `UnicodeEncodeError` for half a surrogate pair."""
    # ASCII is counted without an encoded copy
    return len(text) if text.isascii() else len(text.encode())
