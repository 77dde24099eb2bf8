"""Tasks made of random letters and numbers: they test a model's computation, independently of its knowledge.

They need no data, and are the same on every machine. A model that has learned to copy but fails at longer ones points
at its positions, its window or its routing, long before the loss shows it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any

from attrs import field, frozen
from attrs.validators import and_, deep_iterable, ge, gt, le, min_len

from forge_plugin_evaluate.tasks.kinds import Item, TaskComponent

CHOICES = 4
BRACKETS = {"(": ")", "[": "]", "{": "}", "<": ">"}
EXAMPLES = 3
"""Sums that are worked before the one that is asked."""


TWO_DIGITS = range(10, 100)
LONGEST = 10_000
"""Of different words of three letters there are 17,576; the last of them would take long to draw."""
MOST_DIGITS = 4_000
"""Python writes no number of more than 4,300 digits (`sys.set_int_max_str_digits`)."""


def _lengths(default: tuple[int, ...], least: int, most: int = LONGEST) -> tuple[int, ...]:
    """The field `lengths`, with its smallest and its largest value."""
    number: Any = and_(ge(least), le(most))
    return field(default=default, validator=and_(min_len(1), deep_iterable(number)))  # type: ignore[no-any-return]


@frozen(kw_only=True)
class MadeTask(TaskComponent):
    """Base of tasks whose items are drawn from a seed."""

    items: int = field(default=100, validator=gt(0))
    """Number of items."""
    seed: int = field(default=0, validator=ge(0))
    """Seed of the items. Any other seed makes other items of the same kind."""

    def load(self) -> Sequence[Item]:
        """Draws the items from a generator that depends on the seed and the name of the class alone."""
        # By a text and not by a number: `random` hashes it with SHA-512, so tasks of one seed share no numbers.
        draw = random.Random(f"{type(self).__name__} {self.seed}")  # noqa: S311  # no secret
        return [self._item(draw, number) for number in range(self.items)]

    def _item(self, draw: random.Random, number: int) -> Item:
        raise NotImplementedError


def choose(draw: random.Random, context: str, answer: str, others: Sequence[str]) -> Item:
    """The item with the answer among some of the others, in a random order."""
    choices = [answer, *others]
    draw.shuffle(choices)
    return Item(context, tuple(choices), choices.index(answer))


def _words(draw: random.Random, count: int) -> list[str]:
    """Different words of three random letters."""
    # A dict, since the order in a set depends on the process, and items must be the same on every rank
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(draw.choices(ascii_lowercase, k=3))] = None
    return list(words)


@frozen(kw_only=True)
class Copy(MadeTask):
    """Repeat a row of random words. Wrong choices have one word exchanged."""

    lengths: tuple[int, ...] = _lengths((2, 4, 8), 1)
    """Words of a row; items take these in turn."""

    def _item(self, draw: random.Random, number: int) -> Item:
        length = self.lengths[number % len(self.lengths)]
        words = _words(draw, length + CHOICES - 1)
        row, strange = words[:length], words[length:]
        places = [draw.randrange(length) for _ in strange]
        others = [[*row[:place], word, *row[place + 1 :]] for word, place in zip(strange, places, strict=True)]
        context = f"{' '.join(row)} ="
        return choose(draw, context, f" {' '.join(row)}", [f" {' '.join(other)}" for other in others])


@frozen(kw_only=True)
class Induction(MadeTask):
    """Continue a repeated row of random words (Olsson et al. 2022). Wrong choices are other words of the row."""

    lengths: tuple[int, ...] = _lengths((4, 8, 16), CHOICES)
    """Words of a row; items take these in turn."""

    def _item(self, draw: random.Random, number: int) -> Item:
        length = self.lengths[number % len(self.lengths)]
        row = _words(draw, length)
        again = draw.randrange(1, length)  # not 0, where nothing is repeated yet
        others = draw.sample(row[:again] + row[again + 1 :], CHOICES - 1)
        return choose(draw, " ".join(row + row[:again]), f" {row[again]}", [f" {word}" for word in others])


@frozen(kw_only=True)
class Recall(MadeTask):
    """Find the number that stands after a word in a list. Wrong choices are other numbers of the list."""

    lengths: tuple[int, ...] = _lengths((4, 8, 16), CHOICES, len(TWO_DIGITS))
    """Entries of a list; items take these in turn."""

    def _item(self, draw: random.Random, number: int) -> Item:
        length = self.lengths[number % len(self.lengths)]
        # Numbers of two digits, so that no answer is longer than another
        table = dict(zip(_words(draw, length), draw.sample(TWO_DIGITS, length), strict=True))
        asked = draw.choice(list(table))
        others = draw.sample([value for word, value in table.items() if word != asked], CHOICES - 1)
        listed = "".join(f"{word}: {value}\n" for word, value in table.items())
        return choose(draw, f"{listed}{asked}:", f" {table[asked]}", [f" {value}" for value in others])


@frozen(kw_only=True)
class Arithmetic(MadeTask):
    """Add two numbers, after three worked sums. Wrong choices differ from the sum in one digit's place."""

    digits: tuple[int, ...] = _lengths((1, 2, 3), 1, MOST_DIGITS)
    """Digits of the numbers; items take these in turn."""

    def _item(self, draw: random.Random, number: int) -> Item:
        digits = self.digits[number % len(self.digits)]
        pairs = [[draw.randrange(10 ** (digits - 1), 10**digits) for _ in range(2)] for _ in range(EXAMPLES + 1)]
        (one, other), right = pairs[-1], sum(pairs[-1])
        # Wrong by 1 in the place of any digit, or by -2, 2 or 3 in the last place; no choice is negative.
        steps = sorted({sign * 10**place for place in range(digits) for sign in (1, -1)} | {2, -2, 3})
        near = draw.sample([right + step for step in steps if right + step >= 0], CHOICES - 1)
        worked = "".join(f"{a} + {b} = {a + b}\n" for a, b in pairs[:-1])
        return choose(draw, f"{worked}{one} + {other} =", f" {right}", [f" {value}" for value in near])


@frozen(kw_only=True)
class Brackets(MadeTask):
    """Close the bracket that was opened last among four kinds."""

    lengths: tuple[int, ...] = _lengths((4, 8, 16), 1)
    """Brackets before the one that is asked, of which some may be closed already; items take these in turn."""

    def _item(self, draw: random.Random, number: int) -> Item:
        length = self.lengths[number % len(self.lengths)]
        row: list[str] = []
        opened: list[str] = []
        for place in range(length):
            # The last one opens where none is open, so that there is always one to close.
            if opened and draw.random() < 0.5 and not (len(opened) == 1 and place == length - 1):
                row.append(BRACKETS[opened.pop()])
            else:
                opened.append(draw.choice(list(BRACKETS)))
                row.append(opened[-1])
        right = BRACKETS[opened[-1]]
        others = [f" {bracket}" for bracket in BRACKETS.values() if bracket != right]
        return choose(draw, " ".join(row), f" {right}", others)
