"""Items as rows of tokens: context and choice, padded to one length, of which the choice alone is labelled."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import field, frozen

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.contracts.errors import DataError
from forge_kit.data.tokenizers import begin_of_text
from forge_kit.nn.batches import length_multiple

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_core.contracts.layout import Layout
    from forge_plugin_evaluate.tasks.kinds import Item

ROW = "row"
"""Entry of a batch with the number of each row among the rows of all tasks."""
STEP = 8
"""Lengths of rows are multiples of it, which suits the kernels of matrix products."""


@frozen
class Encoded:
    """A choice after its context."""

    tokens: tuple[int, ...]
    learned: int
    """Number of tokens at the end that belong to the choice."""

    @property
    def positions(self) -> int:
        """Positions that a model is fed: the last token is a label only."""
        return len(self.tokens) - 1


@frozen
class EncodedTask:
    """A task whose items fit into a sequence."""

    label: str
    items: tuple[Item, ...]
    choices: tuple[Encoded, ...]
    """The choices of all items, one item after the other."""
    left_out: int
    """Items that are too long."""


def encode(tokenizer: Tokenizer, label: str, items: Sequence[Item], longest: int, *, leave_out: bool) -> EncodedTask:
    """Encode the items of a task.

    Args:
        tokenizer: the run's.
        label: name of the task, for errors.
        items: its items.
        longest: positions of a sequence.
        leave_out: whether items with a choice that does not fit are left out; otherwise they are an error.

    Raises:
        DataError: an item is too long, or a choice has no token other than its context's; the message names it.
    """
    encoded = list(encode_items(tokenizer, items))
    for number, choices in enumerate(encoded):
        for choice, row in enumerate(choices):
            if not row.learned:
                message = f"choice {choice} of item {number} has no token other than the tokens of its context"
                raise DataError(f"task {label}: {message}; begin it with a space")
    lengths = [max(row.positions for row in choices) for choices in encoded]
    too_long = [number for number, length in enumerate(lengths) if length > longest]
    if too_long and not leave_out:
        message = f"item {too_long[0]} has {lengths[too_long[0]]} positions, and train.seq_len is {longest}"
        counted = f" ({len(too_long)} of {len(items)} items are too long)" if len(too_long) > 1 else ""
        raise DataError(f'task {label}: {message}{counted}; shorten it, or set too_long = "leave_out"')
    if len(too_long) == len(items):
        raise DataError(f"task {label}: every item is longer than train.seq_len = {longest}; leave the task out")
    fits = [number for number, length in enumerate(lengths) if length <= longest]
    rows = tuple(row for number in fits for row in encoded[number])
    return EncodedTask(label, tuple(items[number] for number in fits), rows, len(too_long))


def encode_items(tokenizer: Tokenizer, items: Sequence[Item]) -> Iterator[list[Encoded]]:
    """Yields the encoded choices of each item.

    Context and choice are encoded as one text, and what follows the tokens of the context alone belongs to the choice,
    as in lm-evaluation-harness. Spaces at the end of the context count as the choice's, since most tokenizers put a
    space into the token of the word after it. The tokenizer's beginning of text stands before the context, as before
    documents in training; a context without tokens is an end-of-text.
    """
    begin = begin_of_text(tokenizer)
    contexts, texts = [], []
    for item in items:
        context = item.context.rstrip()
        contexts.append(context)
        texts += [item.context + choice for choice in item.choices]
    heads = tokenizer.encode_batch(contexts)
    whole = iter(tokenizer.encode_batch(texts))
    for item, head in zip(items, heads, strict=True):
        choices = []
        for _ in item.choices:
            tokens = next(whole)
            first = begin or ([] if head else [tokenizer.end_of_text])
            # Fewer tokens than the context alone has, if the tokenizer merges its end with the choice
            choices.append(Encoded((*first, *tokens), max(len(tokens) - len(head), 0)))
        yield choices


def row_length(longest: int, seq_len: int, layout: Layout) -> int:
    """Returns the length of rows: no longer than needed, and divisible as the layout's stages divide sequences.

    Args:
        longest: positions of the longest choice.
        seq_len: positions of a training sequence, which every stage has accepted.
        layout: the run's.
    """
    step = math.lcm(STEP, length_multiple(layout))
    return min(-(-longest // step) * step, seq_len)


@frozen
class ChoiceRows:
    """See `forge_core.contracts.data.Dataset`: one row for each choice of each item of each task."""

    choices: Sequence[Encoded]
    length: int
    padding: int
    held_out: None = None
    bytes_per_token: None = None

    def __len__(self) -> int:
        return len(self.choices)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        row = self.choices[index]
        tokens = np.array(row.tokens, np.int64)
        ids = np.full(self.length, self.padding, np.int64)
        labels = np.full(self.length, IGNORED_LABEL, np.int64)
        ids[: row.positions] = tokens[:-1]
        # Labels are shifted already: position p has the token after it
        labels[row.positions - row.learned : row.positions] = tokens[-row.learned :]
        return {"input_ids": ids, "labels": labels, ROW: np.array(index, np.int64)}


@frozen
class EncodedTasks:
    """All tasks of an evaluation, and their rows."""

    tasks: tuple[EncodedTask, ...]
    rows: ChoiceRows = field(eq=False)

    def digest(self) -> str:
        """SHA-256 (hex) of all tokens, in order."""
        hashed = hashlib.sha256()
        for row in self.rows.choices:
            # With the number of learned tokens: equal texts may be divided into context and choice in other ways
            hashed.update(np.array([row.learned, *row.tokens], np.int64).tobytes())
        return hashed.hexdigest()
