"""Sizes of the global batch over a run: which samples a step takes, tokens, phases, refusals and resumption."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field, frozen
from hypothesis import given
from hypothesis import strategies as st

from forge_core.contracts.components import BatchScheduleComponent, TrainingHook
from forge_core.contracts.contexts import StepContext
from forge_core.engine.trainer import Trainer
from forge_core.job import Phase, TrainSection
from forge_plugin_schedules import Piecewise, Ramp
from forge_testing import Numbers, job_problems, tiny_job
from forge_testing.laws import Interrupted, resumption_law
from forge_testing.outcomes import Die, Stop
from forge_testing.refusals import refuses

SEQ_LEN = 8
DOUBLED = Piecewise(batch_sizes=(2, 4, 8), start_tokens=(6 * SEQ_LEN, 14 * SEQ_LEN))
"""Three steps of 2 (samples 0 to 5), two of 4 (6 to 13), then 8."""


def section(schedule: Piecewise | Ramp, steps: int = 8, largest: int = 8) -> TrainSection:
    return TrainSection(steps=steps, global_batch_size=largest, seq_len=SEQ_LEN, batch_schedule=schedule)


def sizes_step_by_step(train: TrainSection, steps: int, sample: int = 0) -> list[int]:
    """The definition: a step has the size that holds for its first sample."""
    found = []
    for _ in range(steps):
        found.append(next(size for first, size in sorted(train.batch_sizes.items(), reverse=True) if first <= sample))
        sample += found[-1]
    return found


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    spans=st.lists(st.integers(1, 40), min_size=3, max_size=3),
    sample=st.integers(0, 90),
    steps=st.integers(0, 60),
)
def test_positions_are_the_sums_of_the_sizes(sizes: list[int], spans: list[int], sample: int, steps: int) -> None:
    starts = [sum(spans[: number + 1]) * SEQ_LEN for number in range(len(sizes) - 1)]
    train = section(Piecewise(batch_sizes=tuple(sizes), start_tokens=tuple(starts)), largest=max(sizes))
    taken = sizes_step_by_step(train, steps, sample)
    end = sample + sum(taken)
    assert train.sample_after(steps, sample) == end
    assert train.steps_until(end, sample) == steps
    assert not taken or train.steps_until(end - taken[-1] + 1, sample) == steps


def test_one_size_is_plain_arithmetic_in_both_directions() -> None:
    train = TrainSection(steps=8, global_batch_size=4, seq_len=SEQ_LEN)
    assert (train.sample_after(3, 100), train.sample_after(-3, 100)) == (112, 88)
    assert (train.steps_until(109, 100), train.steps_until(95, 100)) == (3, -1)


def test_a_ramp_is_that_of_megatron() -> None:
    """`num_microbatches_calculator.py` there: start + int(consumed / (ramp / increments)) x increment, at most full."""
    train = section(Ramp(start=16, increment=8, ramp_tokens=1000 * SEQ_LEN), largest=64)
    consumed, expected = 0, []
    for _ in range(60):
        per_increment = 1000 / ((64 - 16) // 8)
        expected.append(64 if consumed > 1000 else 16 + int(consumed / per_increment) * 8)
        consumed += expected[-1]
    assert sizes_step_by_step(train, 60) == expected
    assert train.sample_after(60) == consumed


def run(folder: Path, steps: int, *hooks: TrainingHook, **changes: Any) -> list[dict[str, Any]]:
    """The lines of the metrics of steps."""
    changes = {"global_batch_size": 8, "batch_schedule": DOUBLED, **changes}
    summary = Trainer(tiny_job(str(folder), steps=steps, **changes), hooks=hooks, echo=lambda text: None).run()
    lines = map(json.loads, (summary.folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


@define(slots=False)
class Numbered(TrainingHook):
    """Notes the samples of each step, by number, and the sizes of micro-batches."""

    numbers: list[list[int]] = field(factory=list)
    rows: list[list[int]] = field(factory=list)

    def on_step_begin(self, context: StepContext) -> None:
        self.numbers.append([number for batch in context.batches for number in batch["numbers"].tolist()])
        self.rows.append([len(batch["labels"]) for batch in context.batches])


def test_a_run_takes_the_same_samples_in_larger_parts(tmp_path: Path) -> None:
    """Tokens of each line are those that were fed, and the order is that of batches of one size."""
    ours, plain = Numbered(), Numbered()
    lines = run(tmp_path / "a", 6, ours, micro_batch_size=2)
    run(tmp_path / "b", 11, plain, batch_schedule=None, global_batch_size=2)
    assert ours.rows == [[2], [2], [2], [2, 2], [2, 2], [2, 2, 2, 2]]
    assert [*chain(*ours.numbers)] == [*chain(*plain.numbers)]
    assert [line["tokens"] // SEQ_LEN for line in lines] == [2, 4, 6, 10, 14, 22]


def test_without_a_micro_batch_a_step_is_one_pass(tmp_path: Path) -> None:
    seen = Numbered()
    run(tmp_path, 6, seen)
    assert seen.rows == [[2], [2], [2], [4], [4], [8]]


@pytest.mark.parametrize("workers", [0, 2, 3])
def test_workers_share_what_the_smallest_batch_allows(tmp_path: Path, workers: int) -> None:
    """Parts of a step are as many in every step, and no row is lost or read twice."""
    seen = Numbered()
    run(tmp_path, 6, seen, data={"workers": workers})
    read = [*chain(*seen.numbers)]
    assert sorted(read) == sorted(set(read))
    assert [len(step) for step in seen.numbers] == [2, 2, 2, 4, 4, 8]


def test_a_phase_begins_with_the_step_of_its_tokens(tmp_path: Path) -> None:
    """112 tokens are fed after five steps; its factor acts from the sixth on, and its weights from sample 14."""
    sources = (Numbers(name="a"), Numbers(name="b", weight=0.0))
    phase = Phase(start_tokens=14 * SEQ_LEN, weights={"a": 0.0, "b": 1.0}, lr_factor=0.5)
    lines = run(tmp_path, 7, data={"sources": sources, "phases": (phase,)})
    assert [line["lr"] / lines[0]["lr"] for line in lines] == [1, 1, 1, 1, 1, 0.5, 0.5]
    assert ["loss/source/b" in line for line in lines] == [False] * 5 + [True] * 2


def test_a_source_that_runs_out_is_named_with_the_steps_that_need_it(tmp_path: Path) -> None:
    sources = (Numbers(name="a", sequences=10, max_epochs=2),)
    with refuses("data.sources", "steps 1 to 6 need 22 sequences", "leaves 20"):
        run(tmp_path, 6, data={"sources": sources})


test_resumption = resumption_law(
    Interrupted(
        "doubled",
        changes=lambda: {"global_batch_size": 8, "batch_schedule": DOUBLED},
        interruptions=((Stop(step=3),), (Stop(step=4), Die(step=5, event="begin"), Stop(step=5))),
    )
)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Piecewise(batch_sizes=(2, 4), start_tokens=(80,)), ("train.batch_schedule", "global_batch_size = 4")),
        (Piecewise(batch_sizes=(2, 16), start_tokens=(80,)), ("train.batch_schedule", "16", "train.global_batch_size")),
        (Piecewise(batch_sizes=(2, 8), start_tokens=()), ("train.batch_schedule.start_tokens", "0 entries", "2 sizes")),
        (Piecewise(batch_sizes=(2, 4, 8), start_tokens=(80, 80)), ("train.batch_schedule.start_tokens", "ascend")),
        (Piecewise(batch_sizes=(3, 8), start_tokens=(80,)), ("train.batch_schedule", "3", "2 data-parallel ranks")),
        (Ramp(start=2, increment=4, ramp_tokens=80), ("train.batch_schedule.increment", "from 2 in steps of 4", "2")),
        (Ramp(start=9, increment=1, ramp_tokens=80), ("train.batch_schedule.start", "9 is more than")),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_by_key(
    tmp_path: Path, schedule: Piecewise | Ramp, words: Sequence[str]
) -> None:
    problems = job_problems(tiny_job(str(tmp_path), global_batch_size=8, batch_schedule=schedule), ranks=2)
    assert any(all(word in problem for word in words) for problem in problems), problems


@frozen(kw_only=True)
class Wrong(BatchScheduleComponent):
    """A stranger's, whose sizes are wrong."""

    second: int

    def sizes(self, train: TrainSection) -> dict[int, int]:
        return {0: 4, 8: self.second}


@pytest.mark.parametrize("second", [0, -4, 16])
def test_sizes_of_a_stranger_are_checked(tmp_path: Path, second: int) -> None:
    """A phase by tokens asks for steps before the sizes are checked."""
    data = {"phases": (Phase(start_tokens=16 * SEQ_LEN, lr_factor=0.5),)}
    job = tiny_job(str(tmp_path), steps=9, global_batch_size=8, batch_schedule=Wrong(second=second), data=data)
    expected = f"train.batch_schedule: has {second} sequences in a step, not 1 to train.global_batch_size = 8"
    assert expected in job_problems(job)


def test_the_summary_names_the_steps_of_each_size(tmp_path: Path) -> None:
    said: list[str] = []
    Trainer(tiny_job(str(tmp_path), steps=6, global_batch_size=8, batch_schedule=DOUBLED), echo=said.append).run()
    assert any(
        "batch sizes  2 from step 1, 4 from step 4, 8 from step 6 (train.batch_schedule)" in text for text in said
    )
