"""Mixtures and phases in a run: what is drawn, at which rate, and how it goes on after a stop."""

from __future__ import annotations

from collections import Counter

import pytest
from attrs import define, evolve, field, frozen

from forge_core.contracts.components import DatasetComponent, SchedulerComponent, TrainingHook
from forge_core.contracts.errors import CheckpointError
from forge_core.data.order import check_supply, expected_draws
from forge_core.job import Phase
from forge_testing.refusals import lacks, naming, refuses

BASE = 32


@frozen(kw_only=True)
class Numbered(DatasetComponent):
    """Sequences whose first two tokens are their number."""

    sequences: int

    def build(self, context):
        return NumberedSequences(self.sequences, context.job.train.seq_len)


@frozen
class NumberedSequences:
    count: int
    seq_len: int
    held_out: None = None
    bytes_per_token: None = None

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        import numpy as np

        tokens = np.full(self.seq_len + 1, index % 7)
        tokens[:2] = divmod(index, BASE)
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


@define(kw_only=True, slots=False)
class Samples(TrainingHook):
    """Keeps the (source, number) of every sequence that is trained on, step by step, and may stop the run."""

    stop_after: int = 0
    seen: list = field(factory=list)

    def on_step_begin(self, context):
        step = []
        for batch in context.batches:
            numbers = batch["input_ids"][:, 0] * BASE + batch["input_ids"][:, 1]
            step += zip(batch["sources"].tolist(), numbers.tolist(), strict=True)
        self.seen.append(step)

    def on_step_end(self, context):
        if context.step == self.stop_after:
            context.request_stop("enough")


@frozen(kw_only=True)
class Falling(SchedulerComponent):
    """1, 1/2, 1/3, …"""

    def build(self, context):
        return lambda step, total: 1 / (step + 1)


SOURCES = (
    Numbered(name="web", sequences=50, weight=3.0),
    Numbered(name="code", sequences=14, max_epochs=1.5),
    Numbered(name="math", sequences=9, weight=0.0),
)
PHASES = (
    Phase(start_step=4, weights={"math": 2.0, "code": 3.0}, lr_factor=0.5),
    Phase(start_tokens=8 * 8 * 9 - 3, weights={"web": 0.0, "math": 1.0}, lr_factor=0.1),
    Phase(start_step=12, weights={"web": 1.0}),
)
"""24 x 8 sequences of 8 positions; the phases begin after 4, 9 and 12 steps, and code is used up within the second."""


def mixed_job(make_job, **changes):
    data = {"sources": SOURCES, "phases": PHASES, **changes.pop("data", {})}
    return make_job(**{"steps": 16, "global_batch_size": 8, "data": data, **changes})


def drawn(hook, source):
    return [number for step in hook.seen for of, number in step if of == source]


def test_each_phase_draws_by_its_own_weights(make_job, train):
    hook = Samples()
    train(mixed_job(make_job), hook)
    parts = hook.seen[:4], hook.seen[4:9], hook.seen[9:12], hook.seen[12:]
    counts = [Counter(source for step in part for source, _ in step) for part in parts]
    assert counts[0] == {0: 24, 1: 8}
    assert {source: counts[1][source] for source in (1, 2)} == {1: 13, 2: 10}  # code until it is used up
    assert counts[2] == {2: 24}
    assert counts[3] == {0: 16, 2: 16}


def test_a_source_leaves_at_its_limit_and_the_others_share_its_part(make_job, train):
    hook = Samples()
    train(mixed_job(make_job), hook)
    code = drawn(hook, 1)
    assert len(code) == 21  # 1.5 x 14
    assert sorted(code[:14]) == list(range(14))
    second = [source for step in hook.seen[4:9] for source, _ in step]
    after = second[max(i for i, source in enumerate(second) if source == 1) + 1 :]
    assert abs(Counter(after)[0] - 0.6 * len(after)) <= 0.5  # web and math are 3 to 2


def test_phases_neither_repeat_nor_leave_out_a_sequence(make_job, train):
    with_phases, without = Samples(), Samples()
    train(mixed_job(make_job), with_phases)
    plain = tuple(evolve(source, weight=1.0, max_epochs=0.0) for source in SOURCES)
    train(mixed_job(make_job, steps=40, data={"sources": plain, "phases": ()}, job={"name": "plain"}), without)
    for source in SOURCES:
        number = SOURCES.index(source)
        numbers = drawn(with_phases, number)
        assert numbers == drawn(without, number)[: len(numbers)]
        epochs = [numbers[start : start + source.sequences] for start in range(0, len(numbers), source.sequences)]
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs)


def test_the_rate_is_base_times_schedule_times_the_phase_factor(make_job, train, lines):
    rates = [record["lr"] for record in lines(train(mixed_job(make_job, scheduler=Falling())))]
    factors = [1.0] * 4 + [0.5] * 5 + [0.1] * 3 + [1.0] * 4
    assert rates == pytest.approx([1e-2 / (step + 1) * factor for step, factor in enumerate(factors)])


@pytest.mark.parametrize(("stop", "workers"), [(2, 0), (4, 0), (4, 2), (6, 0), (9, 0), (11, 0), (11, 2), (14, 0)])
def test_a_run_stopped_in_any_phase_goes_on_exactly(make_job, train, lines, stop, workers):
    data = {"workers": workers}
    whole, first, rest = Samples(), Samples(stop_after=stop), Samples()
    expected = lines(train(mixed_job(make_job, job={"name": "whole"}), whole))
    assert train(mixed_job(make_job, data=data), first).stopped == "enough"
    found = lines(train(mixed_job(make_job, data=data), rest))
    assert first.seen + rest.seen == whole.seen
    keys = ("step", "loss", "lr", "grad_norm", "loss/source/web", "loss/source/code", "loss/source/math")
    assert [[r.get(k) for k in keys] for r in found] == [[r.get(k) for k in keys] for r in expected]


class TestSupply:
    """Whether the sources last, told before the first step."""

    def check(self, make_job, **changes):
        job = make_job(**changes)
        check_supply(job, [source.sequences for source in job.data.sources])

    def test_limits_that_cannot_fill_the_run_are_refused_with_the_arithmetic(self, make_job, train):
        sources = (Numbered(name="web", sequences=20, max_epochs=2.5), Numbered(name="code", sequences=9, max_epochs=1))
        job = make_job(steps=16, data={"sources": sources})
        sums = ("steps 1 to 16", "need 64", 59, "web 50", "(2.5 x 20)", "code 9", "(1 x 9)")
        with refuses("data.sources", *sums, "max_epochs", "weight", "train.steps"):
            train(job)

    def test_limits_that_just_fill_the_run_are_enough(self, make_job, train):
        sources = (Numbered(sequences=20, max_epochs=2.5, weight=9.0), Numbered(sequences=14, max_epochs=1))
        hook = Samples()
        train(make_job(steps=16, data={"sources": sources}), hook)
        assert Counter(source for step in hook.seen for source, _ in step) == {0: 50, 1: 14}

    def test_one_source_without_a_limit_is_enough(self, make_job, train):
        sources = (Numbered(sequences=20, max_epochs=0.5), Numbered(sequences=3))
        assert train(make_job(steps=16, data={"sources": sources})).step == 16

    def test_a_phase_whose_sources_run_out_is_named(self, make_job):
        sources = (Numbered(name="web", sequences=500), Numbered(name="code", sequences=30, max_epochs=1))
        phases = (Phase(start_step=5, weights={"web": 0}),)
        with refuses("data.sources", "steps 6 to 16", "need 44", 20, "code 30"):
            self.check(make_job, steps=16, data={"sources": sources, "phases": phases})

    def test_where_phases_differ_the_turns_themselves_decide(self, make_job, train):
        """Of 8 samples by thirds, web gets 3 and code 3, and not the 2 2/3 that leave it 4 for the phase after."""
        names = ("web", "code", "math")
        sources = tuple(Numbered(name=name, sequences=6 if name == "web" else 60, max_epochs=1) for name in names)
        phases = (Phase(start_step=2, weights={"code": 0, "math": 0}),)
        hook = Samples()
        train(make_job(steps=2, data={"sources": sources}), hook)
        taken = Counter(source for step in hook.seen for source, _ in step)[0]
        assert taken == 3
        data = {"sources": sources, "phases": phases}
        with refuses("data.sources", "steps 3 to 3", "need 4 ", "leaves 3"):
            self.check(make_job, steps=3, data=data)
        enough = (evolve(sources[0], sequences=7), *sources[1:])
        check_supply(make_job(steps=3, data={**data, "sources": enough}), [7, 60, 60])

    def test_an_empty_source_is_refused_only_if_it_is_ever_drawn(self, make_job):
        sources = (Numbered(name="web", sequences=9), Numbered(name="code", sequences=0, weight=0.0))
        phases = (Phase(start_step=2, weights={"code": 1}),)
        with refuses("data.sources.1", 0, 2):
            self.check(make_job, data={"sources": sources, "phases": phases})
        check_supply(make_job(data={"sources": sources}), [9, 0])

    def test_a_source_that_a_batch_takes_more_from_than_it_has_is_refused(self, make_job):
        sources = (Numbered(name="web", sequences=9), Numbered(name="code", sequences=2))
        check_supply(make_job(data={"sources": sources}), [9, 2])
        with refuses("data.sources.0", 3, 4):
            self.check(make_job, data={"sources": (Numbered(sequences=3),)})
        phases = (Phase(start_step=2, weights={"code": 3}),)
        with refuses("data.sources.1", 2, 3):
            self.check(make_job, data={"sources": sources, "phases": phases})
        once = (Numbered(name="web", sequences=9), Numbered(name="code", sequences=2, weight=9.0, max_epochs=1.0))
        check_supply(make_job(steps=2, data={"sources": once}), [9, 2])

    def test_a_limit_below_one_sequence_is_refused(self, make_job):
        with refuses("data.sources.0.max_epochs", 0.1, 9):
            self.check(make_job, data={"sources": (Numbered(sequences=9, max_epochs=0.1),)})

    def test_a_stream_has_no_epochs_to_limit(self, make_job):
        job = make_job(data={"sources": (Numbered(sequences=9, max_epochs=2.0),)})
        with refuses("data.sources.0.max_epochs", "stream"):
            check_supply(job, [None])

    def test_what_is_left_counts_when_a_run_goes_on(self, make_job, train):
        """The second part takes what the first has left, not what the sources held at first."""
        sources = (Numbered(sequences=20, max_epochs=2.0),)
        train(make_job(steps=6, data={"sources": sources}))
        assert train(make_job(steps=10, data={"sources": sources})).step == 10
        with refuses("data.sources", "steps 11 to 12", "need 8 ", "leaves 0"):
            train(make_job(steps=12, data={"sources": sources}))

    def test_expectations_follow_phases_and_limits(self, make_job, train):
        job, hook = mixed_job(make_job), Samples()
        train(job, hook)
        counts = Counter(source for step in hook.seen for source, _ in step)
        expected = expected_draws(job, [50, 14, 9])
        assert sum(expected) == 16 * 8
        assert [counts[source] for source in range(3)] == pytest.approx(expected, abs=1)


class TestOtherSources:
    """A run that goes on with other sources than it had."""

    def start(self, make_job, train):
        hook = Samples()
        train(make_job(steps=4, global_batch_size=8, data={"sources": SOURCES[:2]}), hook)
        return hook

    def go_on(self, make_job, train, sources, *hooks, **options):
        job = make_job(steps=8, global_batch_size=8, data={"sources": sources})
        return train(job, *hooks, **{"resume_with_changes": True, **options})

    def test_an_added_one_starts_at_its_first_sequence_and_the_others_go_on(self, make_job, train):
        first, rest, alone = self.start(make_job, train), Samples(), Samples()
        added = Numbered(name="math", sequences=9, weight=4.0)
        self.go_on(make_job, train, (added, *SOURCES[:2]), rest)
        assert Counter(source for step in rest.seen for source, _ in step) == {0: 16, 1: 12, 2: 4}
        train(make_job(steps=9, data={"sources": (evolve(SOURCES[0], weight=1.0),)}, job={"name": "web"}), alone)
        assert drawn(first, 0) + drawn(rest, 1) == drawn(alone, 0)

    def test_a_removed_one_is_dropped(self, make_job, train):
        first, rest = self.start(make_job, train), Samples()
        assert self.go_on(make_job, train, SOURCES[:1], rest).step == 8
        web = drawn(first, 0) + drawn(rest, 0)
        assert len(web) == 24 + 32
        assert sorted(web[:50]) == list(range(50))

    @pytest.mark.parametrize("sequences", [49, 51])
    def test_data_that_has_changed_its_size_needs_the_flag(self, make_job, train, monkeypatch, sequences):
        """The job is the same; what it reads is not."""
        self.start(make_job, train)
        monkeypatch.setattr(NumberedSequences, "__len__", lambda self: sequences if self.count == 50 else self.count)
        with pytest.raises(CheckpointError, match=naming("source 'web'", 50, sequences)):
            self.go_on(make_job, train, SOURCES[:2], resume_with_changes=False)
        told = []
        assert self.go_on(make_job, train, SOURCES[:2], echo=told.append).step == 8
        [change] = [line for line in "\n".join(told).splitlines() if "source 'web'" in line]
        assert not lacks(change, 50, sequences)


def test_other_phases_need_the_flag_and_then_act_from_here_on(make_job, train, lines):
    train(mixed_job(make_job), Samples(stop_after=6))
    changed = {"phases": (evolve(PHASES[0], lr_factor=0.25), *PHASES[1:])}
    with pytest.raises(CheckpointError, match=naming("data.phases.0.lr_factor: 0.5 -> 0.25")):
        train(mixed_job(make_job, data=changed))
    records = lines(train(mixed_job(make_job, data=changed), resume_with_changes=True))
    assert [record["lr"] for record in records[4:9]] == [0.005] * 2 + [0.0025] * 3


def test_phases_hold_their_step_when_the_batch_size_changes_on_the_way(make_job, train):
    first, rest = Samples(stop_after=3), Samples()
    data = {"sources": SOURCES[::2], "phases": (Phase(start_step=5, weights={"web": 0, "math": 1}),)}
    train(make_job(steps=8, global_batch_size=4, data=data), first)
    train(make_job(steps=8, global_batch_size=8, data=data), rest, resume_with_changes=True)
    assert [Counter(source for source, _ in step) for step in first.seen] == [{0: 4}] * 3
    assert [Counter(source for source, _ in step) for step in rest.seen] == [{0: 8}] * 2 + [{1: 8}] * 3


def test_the_plan_tells_shares_passes_and_phases(make_job, train):
    told = []
    train(mixed_job(make_job), echo=told.append)
    plan = {name: text.strip() for name, text in (line.split("  ", 1) for line in told[0].splitlines())}
    assert plan["data"] == "3 sources; none held out"
    assert plan["source web"] == "share 0.75, 50 sequences, 1.12 passes"
    assert plan["source code"] == "share 0.25, 14 sequences, 1.5 passes, its limit"
    assert plan["source math"] == "share 0, 9 sequences, 5.64 passes"
    assert plan["phase 0"] == "from step 5: web 0.375, code 0.375, math 0.25; rate x 0.5"
    assert plan["phase 1"] == "from step 10: web 0, code 0.75, math 0.25; rate x 0.1"


def test_the_plan_of_a_single_source_is_one_line(make_job, train):
    told = []
    train(make_job(), echo=told.append)
    [row] = [line for line in told[0].splitlines() if line.startswith("data")]
    assert row.split(None, 1)[1] == "64 sequences, 0.25 passes; 8 held out"
