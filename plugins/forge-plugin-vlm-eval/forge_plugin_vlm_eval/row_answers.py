"""Answers of a model to rows with images. S: positions, P: patches of a row, V: values of a patch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import field, frozen
from rapidfuzz.distance import Levenshtein

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.data.reading import collate
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_generate.prompts import stop_ids
from forge_plugin_vision import GRIDS, PATCHES, image_input
from forge_plugin_vlm_eval.frame_order import Order, has_clips, reordered, shuffled, still
from forge_plugin_vlm_eval.questions import ends_of_images, images_of

if TYPE_CHECKING:
    from forge_core.contracts.contexts import EvaluationContext
    from forge_core.contracts.data import Dataset
    from forge_plugin_vision import ImageInput
    from forge_plugin_vlm_eval.answers import Answers

Row = Mapping[str, np.ndarray]
AT_A_TIME = 16
"""Rows of one batch."""
ORDERS: Mapping[str, Callable[[int], Order]] = {"still": lambda number: still, "shuffled": shuffled}
"""Orders of the frames of clips that take their motion away, by the number of the row: each frame is the first one, or
they are shuffled."""


@frozen(kw_only=True)
class Answer:
    """What a model said of a row's images."""

    row: Row
    expected: str
    said: str
    bits: float
    """Information that the model took from the images about the learned text of the row, in bits."""
    without_motion: Mapping[str, str] = field(factory=dict)
    """What it said where the frames of the row's clips were in `ORDERS`, by name; empty where it has none."""

    @property
    def is_right(self) -> bool:
        """Whether the answer equals the expected text in every character, spaces included."""
        return self.said == self.expected

    def is_right_with(self, order: str) -> bool:
        """Whether the answer is right all the same with the frames in one of `ORDERS`."""
        return self.without_motion[order] == self.expected

    @property
    def letters(self) -> float:
        """One minus the edit distance (Levenshtein), relative to the longer text."""
        return 1 - Levenshtein.normalized_distance(self.said, self.expected)


def answered(settings: Answers, context: EvaluationContext) -> list[Answer]:
    """Returns the answers to held-out rows; none if no row has an image."""
    rows = list(_rows(context.held_out, settings.sequences)) if context.held_out is not None else []
    answers: list[Answer] = []
    for start in range(0, len(rows), AT_A_TIME):
        part = rows[start : start + AT_A_TIME]
        half = max(1, len(rows) // 2)  # neighbours are often alike
        others = [rows[(number + half) % len(rows)] for number in range(start, start + len(part))]
        bits = _bits(part, others, context)
        texts, others_said = _texts(part, settings, context), _without_motion(part, start, settings, context)
        pairs = zip(part, texts, bits, others_said, strict=True)
        answers += [
            Answer(row=row, expected=right, said=said, bits=bit, without_motion=without)
            for row, (right, said), bit, without in pairs
        ]
    return answers


def _without_motion(
    rows: Sequence[Row], start: int, settings: Answers, context: EvaluationContext
) -> Sequence[Mapping[str, str]]:
    """Returns, for each row with clips, the model's answer with the frames in each of `ORDERS`.

    Args:
        rows: of one batch.
        start: number of the first of them.
        settings: of the evaluation.
        context: of the evaluation.
    """
    form, numbers = image_input(context.job).format, [number for number, row in enumerate(rows) if has_clips(row)]
    said: list[dict[str, str]] = [{} for _ in rows]
    # Ranks that generate together have the same rows, so all of them come here or none does.
    for name, order in ORDERS.items() if numbers else ():
        changed = [reordered(rows[number], form, order(start + number)) for number in numbers]
        texts = _texts(changed, settings, context)
        for number, (_, text) in zip(numbers, texts, strict=True):
            said[number][name] = text
    return said


def _rows(dataset: Dataset, count: int) -> Iterator[Row]:
    """Yields rows with images and something to learn, spread evenly."""
    for number in range(min(count, len(dataset))):
        row = dataset[number * len(dataset) // min(count, len(dataset))]
        if GRIDS in row and row[GRIDS].any() and (row["labels"] != IGNORED_LABEL).any():
            yield row


def _texts(rows: Sequence[Row], settings: Answers, context: EvaluationContext) -> list[tuple[str, str]]:
    """Returns the right text and the model's, for each row."""
    tokenizer = context.build.tokenizer
    assert tokenizer is not None
    end, stop = tokenizer.end_of_text, stop_ids(tokenizer)
    firsts = [int(np.argmax(row["labels"] != IGNORED_LABEL)) for row in rows]
    # A label is the token after its position, so the prompt includes position `first`.
    prompts = [row["input_ids"][: first + 1].tolist() for row, first in zip(rows, firsts, strict=True)]
    right = [list(_learned(row["labels"][first:], stop)) for row, first in zip(rows, firsts, strict=True)]
    seen = image_input(context.job)
    images = [images_of(row, 0, _images_before(row, first, seen)) for row, first in zip(rows, firsts, strict=True)]
    entries = {name: tensor.to(context.build.device) for name, tensor in collate(images).items()}
    # Greedy, so that the same weights give the same metrics at each evaluation
    greedy = Sampling(temperature=0)
    said = generate(context.model, prompts, settings.max_tokens, end, greedy, stop=stop, entries=entries)
    return [(tokenizer.decode(one), tokenizer.decode(other)) for one, other in zip(right, said, strict=True)]


def _images_before(row: Row, first: int, seen: ImageInput) -> int:
    """Returns how many of a row's images stand before its first learned text, which begins after position `first`."""
    return ends_of_images(row, seen)[int((row["input_ids"][: first + 1] < 0).sum())]


def _learned(labels: np.ndarray, stop: Sequence[int]) -> Iterator[int]:
    """Yields the first run of learned tokens, up to where generation would stop."""
    for label in labels.tolist():
        if label in (IGNORED_LABEL, *stop):
            return
        yield label


def _bits(rows: Sequence[Row], others: Sequence[Row], context: EvaluationContext) -> list[float]:
    """Returns for each row how many bits more its text takes with another row's images."""
    # Only patches are exchanged: grids stay, so that both passes have the same positions.
    wrong = [{**row, PATCHES: other[PATCHES]} for row, other in zip(rows, others, strict=True)]
    return ((_losses(wrong, context) - _losses(rows, context)) / math.log(2)).tolist()


def _losses(rows: Sequence[Row], context: EvaluationContext) -> torch.Tensor:
    """(rows,): the sum of the losses of each row's labels, in nats."""
    fields = context.job.model.batch_fields(context.job)
    batch = {name: tensor.to(context.build.device) for name, tensor in collate(rows, fields).items()}
    sums, _ = context.executor.evaluate([batch]).per_sequence
    # Ranks that share a row each hold a part of its loss; data-parallel ranks each hold the whole loss here.
    return (context.all_reduce(sums.double()) / context.build.layout.data_parallel).cpu()
