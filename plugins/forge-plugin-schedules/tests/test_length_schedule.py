"""Sequences whose length changes within the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define, field

from forge_core.contracts.components import TrainingHook
from forge_core.contracts.contexts import StepContext
from forge_core.engine.trainer import Trainer
from forge_plugin_schedules import LengthSchedule, Piecewise
from forge_plugin_schedules.length_schedule import _cut
from forge_testing import job_problems, tiny_job

QUARTER = LengthSchedule(lengths=(2, 8), start_tokens=(32,))
"""With batches of four sequences of 8 tokens: pieces of 2 in the first step, then whole sequences."""


@define(slots=False)
class Shapes(TrainingHook):
    """The shapes of each step."""

    seen: list[tuple[int, ...]] = field(factory=list)

    def on_step_begin(self, context: StepContext) -> None:
        self.seen += [tuple(batch["input_ids"].shape) for batch in context.batches]


def run(folder: Path, *hooks: TrainingHook, **changes: Any) -> None:
    job = tiny_job(str(folder), steps=3, hooks={"longer": QUARTER}, **changes)
    Trainer(job, hooks=hooks, echo=lambda text: None).run()


def test_lengths_begin_after_their_tokens_also_where_batches_grow(tmp_path: Path) -> None:
    plain, grown = Shapes(), Shapes()
    run(tmp_path / "a", plain)
    batches = Piecewise(batch_sizes=(2, 4), start_tokens=(32,))
    run(tmp_path / "b", grown, batch_schedule=batches)
    assert plain.seen == [(16, 2), (4, 8), (4, 8)]
    assert grown.seen == [(8, 2), (8, 2), (4, 8)]


def test_what_belongs_to_a_row_goes_with_each_piece_and_counts_once() -> None:
    batch = {
        "labels": torch.arange(8).view(2, 4),
        "points": torch.arange(16.0).view(2, 4, 2),
        "sources": torch.tensor([5, 6]),
        "examples": torch.tensor([3, 1]),
    }
    pieces = _cut(batch, 2, 2)
    assert pieces["labels"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert pieces["points"].shape == (4, 2, 2)
    assert pieces["sources"].tolist() == [5, 5, 6, 6]
    assert pieces["examples"].tolist() == [3, 0, 1, 0]


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (
            LengthSchedule(lengths=(3, 8), start_tokens=(32,)),
            ("longer.lengths.0", "3 does not divide train.seq_len = 8"),
        ),
        (LengthSchedule(lengths=(4, 8), start_tokens=()), ("longer.start_tokens", "0 entries", "2 lengths")),
        (LengthSchedule(lengths=(2, 4, 8), start_tokens=(64, 32)), ("longer.start_tokens", "ascend")),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_by_key(
    tmp_path: Path, hook: LengthSchedule, words: Sequence[str]
) -> None:
    problems = job_problems(tiny_job(str(tmp_path), hooks={"longer": hook}))
    assert any(all(word in problem for word in words) for problem in problems), problems
