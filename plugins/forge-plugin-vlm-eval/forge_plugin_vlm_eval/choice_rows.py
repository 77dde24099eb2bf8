"""Choices as rows: a question and one of its choices, of which the choice alone is labelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from attrs import field, frozen

from forge_core.contracts.data import IGNORED_LABEL
from forge_plugin_evaluate.tasks.rows import ROW

if TYPE_CHECKING:
    from forge_plugin_vlm_eval.question_rows import Asked, Questions


@frozen
class Choice:
    """A choice of a question."""

    asked: Asked
    tokens: Sequence[int]

    @property
    def positions(self) -> int:
        """Positions that a model is fed: the last token is a label only."""
        return len(self.asked.question.prompt) + len(self.tokens) - 1


@frozen
class ChoiceRows:
    """See `forge_core.contracts.data.Dataset`: one row for each choice of each question."""

    questions: Questions
    choices: Sequence[Choice]
    length: int
    padding: int
    held_out: None = None
    bytes_per_token: None = None
    _images: object = field(init=False, eq=False)

    def __attrs_post_init__(self) -> None:
        # The choices of a question follow each other, and its images need not be decoded for each of them.
        object.__setattr__(self, "_images", lru_cache(1)(self._entries))

    def __len__(self) -> int:
        return len(self.choices)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        choice = self.choices[index]
        prompt = choice.asked.question.prompt
        tokens = np.concatenate([prompt, choice.tokens])
        ids = np.full(self.length, self.padding, np.int64)
        labels = np.full(self.length, IGNORED_LABEL, np.int64)
        # Labels are shifted: the last position of the prompt predicts the first token of the choice
        ids[: choice.positions] = tokens[:-1]
        labels[len(prompt) - 1 : choice.positions] = choice.tokens
        images = self._images(choice.asked)  # type: ignore[operator]
        return {"input_ids": ids, "labels": labels, ROW: np.array(index, np.int64), **images}

    def _entries(self, asked: Asked) -> Mapping[str, np.ndarray]:
        return asked.question.entries(self.questions.row(asked))
