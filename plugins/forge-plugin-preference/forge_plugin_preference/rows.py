"""Rows of answers: as many examples as fit, each document apart from the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import numpy as np
from attrs import define, field, frozen

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.contracts.errors import JobError, Problem
from forge_plugin_preference.answers import ABSENT, CHOSEN, KINDS, MARGINS, MISMATCHED, REFERENCE, REJECTED
from forge_plugin_preference.encoding import Document, answering

OPEN_ROWS = 64
"""Rows that are still being filled at a time."""
TooLong = Literal["drop", "truncate", "error"]


@frozen(eq=False)
class Example:
    """What is learned together: a pair, or one answer."""

    line: int
    documents: tuple[Document, ...]
    desirable: tuple[bool, ...]
    reference: tuple[float, ...]
    mismatched: Document | None = None
    """The prompt with the answer to another one."""
    margin: float | None = None
    """Of a pair, by how much its first answer is better; None if the loss does not need it."""

    @property
    def length(self) -> int:
        return sum(len(document.ids) for document in self.documents)

    @property
    def room(self) -> tuple[int, int]:
        """Positions that it takes, also of the row of mismatched answers."""
        return self.length, 0 if self.mismatched is None else len(self.mismatched.ids)


@define
class Fitted:
    """Examples that fit into a row, and what became of the others."""

    examples: list[Example]
    counts: Counter[str] = field(factory=Counter)
    """`dropped` and `truncated`."""


def fit(examples: Sequence[Example], length: int, too_long: TooLong, begin: int, path: str) -> Fitted:
    """Leave out or shorten the examples that are longer than a row.

    Args:
        examples: all.
        length: positions of a row.
        too_long: what to do with those that are longer.
        begin: tokens at the start of a prompt that stay there: the beginning of text.
        path: of the file, for errors.

    Raises:
        JobError: with `error`, there are such; each line is named.
    """
    fitted = Fitted([])
    problems = []
    for example in examples:
        over = example.length - length
        if over > 0 and too_long == "error":
            message = f"its answers with their prompts take {example.length} tokens, and a row has {length}"
            problems.append(f"{path}, line {example.line}: {message}; raise train.seq_len, or set too_long")
        elif over > 0:
            shorter = _shortened(example, over, begin) if too_long == "truncate" else None
            fitted.counts["dropped" if shorter is None else "truncated"] += 1
            fitted.examples += [] if shorter is None else [shorter]
        else:
            fitted.examples.append(example)
    if problems:
        more = [f"… and {len(problems) - 20} more lines of {path}"] if len(problems) > 20 else []
        raise JobError([Problem("too_long", problem) for problem in (*problems[:20], *more)])
    return fitted


def _shortened(example: Example, over: int, begin: int) -> Example | None:
    """The example without the first tokens of its prompt; None if what is left is still too long."""
    # All answers of an example lose the same tokens: they answer the same prompt
    cut = -(-over // len(example.documents))
    # One token has to stay before the answer, to predict its first one from
    if any(document.prompt - cut < max(begin, 1) for document in example.documents):
        return None
    documents = tuple(document.without(begin, begin + cut) for document in example.documents)
    return attrs.evolve(example, documents=documents)


def with_mismatched(examples: Sequence[Example], length: int) -> list[Example]:
    """Give each example its prompt with the answer to the next one's, in order and around; cut at `length`."""
    following = [*examples[1:], *examples[:1]]
    pairs = [answering(a.documents[0], b.documents[0]) for a, b in zip(examples, following, strict=True)]
    cut = [Document(each.ids[:length], each.learned[:length], each.prompt) for each in pairs]
    return [attrs.evolve(each, mismatched=document) for each, document in zip(examples, cut, strict=True)]


def pack(examples: Sequence[Example], length: int, most: int) -> list[list[Example]]:
    """Distribute examples over rows, in order: each into the open row that it fills best, at most `most` to a row."""
    rows: list[list[Example]] = []
    open_rows: list[tuple[int, int, list[Example]]] = []
    for example in examples:
        need, need_mismatched = example.room
        fitting = [
            place for place, (room, other, _) in enumerate(open_rows) if need <= room and need_mismatched <= other
        ]
        if fitting:
            # The least room left; of equal ones the oldest, so that the result depends on the data alone
            room, other, row = open_rows.pop(min(fitting, key=lambda place: open_rows[place][0]))
        else:
            room, other, row = length, length, []
            rows.append(row)
        row.append(example)
        if len(row) < most:
            open_rows.append((room - need, other - need_mismatched, row))
        if len(open_rows) > OPEN_ROWS:
            # The fullest one, into which the next examples fit least
            open_rows.remove(min(open_rows, key=lambda each: each[0]))
    return rows


@frozen(eq=False)
class Rows:
    """See `forge_core.contracts.data.Dataset`."""

    rows: Sequence[Sequence[Example]]
    length: int
    """Positions of a row."""
    places: int
    """Ids of documents in a row, the one of the padding included."""
    padding: int
    """Id of the token that fills a row."""
    digest: str
    path: str
    counts: Mapping[str, int]
    held_out: Rows | None = None
    bytes_per_token: float | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        """The entries of a row: see `forge_plugin_preference.answers`."""
        row = self.rows[index]
        documents = [document for example in row for document in example.documents]
        ids, labels, document_ids, positions = self._laid_out(documents)
        kinds = np.full((1, self.places), ABSENT, np.int64)
        desirable = [each for example in row for each in example.desirable]
        kinds[0, : len(documents)] = np.where(desirable, CHOSEN, REJECTED)
        entries: dict[str, Any] = {
            "input_ids": ids,
            "labels": labels,
            "document_ids": document_ids,
            "positions": positions,
        }
        entries |= {KINDS: kinds, "examples": np.int64(len(row))}
        if row[0].reference:
            reference = np.zeros((1, self.places))
            reference[0, : len(documents)] = [value for example in row for value in example.reference]
            entries[REFERENCE] = reference
        if row[0].margin is not None:
            margins = np.zeros((1, self.places))
            # At the first answer of each pair
            margins[0, 0 : len(documents) : 2] = [example.margin for example in row]
            entries[MARGINS] = margins
        mismatched = [example.mismatched for example in row if example.mismatched is not None]
        if mismatched:
            entries[MISMATCHED] = np.stack(self._laid_out(mismatched))
        return entries

    def _laid_out(self, documents: Sequence[Document]) -> tuple[np.ndarray, ...]:
        """(S,) int64 each: ids, labels, ids of documents and positions, of documents one after the other."""
        ids = np.full(self.length, self.padding, np.int64)
        labels = np.full(self.length, IGNORED_LABEL, np.int64)
        numbers = np.full(self.length, self.places - 1, np.int64)
        positions, start = np.zeros(self.length, np.int64), 0
        for number, document in enumerate(documents):
            part = slice(start, start + len(document.ids))
            ids[part], labels[part] = document.entries()
            numbers[part], positions[part] = number, np.arange(len(document.ids))
            start = part.stop
        # Padding is one more document
        positions[start:] = np.arange(self.length - start)
        return ids, labels, numbers, positions

    def describe(self) -> str:
        """Returns how many examples the rows have, how full they are, and what was too long."""
        count = sum(map(len, self.rows))
        pairs = "pairs" if len(self.rows[0][0].documents) == 2 else "answers"
        used = sum(example.length for row in self.rows for example in row)
        most = max(map(len, self.rows))
        text = f"{count:,} {pairs}, up to {most} a row, {used / (len(self.rows) * self.length):.0%} of positions used"
        fates = [f"{number:,} {fate}" for fate, number in self.counts.items() if number]
        return f"{text}; too long: {', '.join(fates)}" if fates else text

    def where(self, index: int) -> str:
        """Names the lines of a row."""
        lines = sorted(example.line for example in self.rows[index])
        return f"{self.path}, line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}"

    def identity(self) -> str:
        """SHA-256 of the file."""
        return self.digest
