"""Rows of a step shared out among ranks and micro-batches by cost: the same samples, the same curve, equal costs."""

from __future__ import annotations

import json

import pytest
import torch
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from forge_core.contracts.components import DatasetComponent, TrainingHook
from forge_core.contracts.data import SampleRow
from forge_core.data.loader import TrainLoader, share_out
from forge_core.engine.build import build_context, build_run
from forge_core.engine.step import Stepper
from forge_core.engine.trainer import Trainer
from forge_core.plugins.catalog import Catalog
from forge_testing import Numbers, tiny_job
from forge_testing.curves import Difference, train
from forge_testing.processes import run_on_ranks
from forge_testing.tiny import NumberSequences


@frozen
class CostlySequences(NumberSequences):
    def cost(self, index):
        return float(2 ** (index % 5))


@frozen(kw_only=True)
class Costly(Numbers):
    """`Numbers` whose sequence i has a cost of 2 ** (i % 5)."""

    def build(self, context):
        plain = super().build(context)
        return CostlySequences(plain.count, plain.seq_len, plain.ignored, plain.start, plain.held_out)


class Lane:
    is_packed, held_out, bytes_per_token, lanes = True, None, None, 8

    def read(self, lane, position):
        sample = NumberSequences(1, 8, 1, lane)[0]
        while True:
            yield sample, {"next": 0}


@frozen(kw_only=True)
class Streamed(DatasetComponent):
    def build(self, context):
        return Lane()


SOURCES = (Costly(), Numbers(start=50))


def job_of(folder="unused", sources=SOURCES, **changes):
    settings = {"global_batch_size": 8, "micro_batch_size": 2, "precision": "fp64", "steps": 3}
    return tiny_job(str(folder), Catalog.installed(), data={"sources": sources}, **settings | changes)


# --- sharing out -------------------------------------------------------------------------------------------------

COSTS = st.lists(st.one_of(st.none(), st.floats(0, 100)), min_size=12, max_size=12)


@given(COSTS, st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_every_row_has_one_place_and_those_without_a_cost_keep_theirs(costs, size):
    rows = [SampleRow(slot, 0, slot) for slot in range(12)]
    shared = share_out(rows, lambda row: costs[row.slot], size)
    assert sorted(shared) == rows
    assert all(shared[place] == rows[place] for place, cost in enumerate(costs) if cost is None)


def test_unequal_rows_make_equal_micro_batches():
    costs = [8.0, 8.0, 1.0, 1.0, 5.0, 4.0, 4.0, 5.0]
    shared = share_out([SampleRow(slot, 0, slot) for slot in range(8)], lambda row: costs[row.slot], 2)
    sums = [costs[one.slot] + costs[two.slot] for one, two in zip(shared[::2], shared[1::2], strict=True)]
    assert sums == [9.0] * 4


# --- training ----------------------------------------------------------------------------------------------------


def rows_of(job, steps, progress=None):
    """The rows of this rank by step, as (slot, source, first ids), and the micro-batches' costs."""
    run = build_run(job, build_context(job, Catalog.installed(), None))
    loader = TrainLoader(job, run.datasets, run.context, progress)
    taken = [loader.next_step() for _ in range(steps)]
    loader.close()
    names = ("slots", "sources", "input_ids")
    return [[[row.tolist() for row in batch[name]] for name in names] for step in taken for batch in step]


def triples(micro_batches):
    return [row for batch in micro_batches for row in zip(*batch, strict=True)]


def test_the_samples_of_a_step_are_those_of_the_order_on_any_number_of_ranks():
    alone = triples(rows_of(job_of(), 1))
    parts = run_on_ranks(2, lambda rank: rows_of(job_of(), 1))
    assert sorted(triples(parts[0]) + triples(parts[1])) == sorted(alone)
    assert sorted(slot for slot, _, _ in alone) == list(range(8))


@pytest.mark.parametrize("micro_batch_size", [0, 1, 2])
def test_ranks_have_about_the_same_costs_and_without_costs_they_have_not(micro_batch_size):
    def loads(rank):
        run = build_run(job, build_context(job, Catalog.installed(), None))
        loader = TrainLoader(job, run.datasets, run.context)
        steps = [torch.cat([batch["input_ids"] for batch in loader.next_step()]) for _ in range(16)]
        loader.close()
        return [[2.0 ** (int(row[0]) % 5) for row in step] for step in steps]

    sources = {"balanced": (Costly(sequences=25, ignored=1),), "as drawn": (Numbers(sequences=25, ignored=1),)}
    idle = {}
    for name, source in sources.items():
        job = job_of(sources=source, micro_batch_size=micro_batch_size)
        one, other = ([sum(step) for step in rank] for rank in run_on_ranks(2, loads))
        idle[name] = sum(abs(a - b) for a, b in zip(one, other, strict=True)) / sum(map(max, one, other))
    assert idle["balanced"] < 0.5 * idle["as drawn"]


def test_the_curve_stays():
    plain = job_of(sources=(Numbers(), Numbers(start=50)))
    expected = train(plain)
    costly = train(job_of())
    on_two_ranks, _ = run_on_ranks(2, lambda rank: train(job_of()))
    for curve in (costly, on_two_ranks):
        difference = Difference.between(curve, expected)
        assert max(difference.loss, difference.norm, difference.gradient) < 1e-12
        assert difference.weights < 1e-9


def draws(job):
    """The first id of each row -> its draw, in the first step, on this rank."""
    run = build_run(job, build_context(job, Catalog.installed(), None))
    loader = TrainLoader(job, run.datasets, run.context)
    batches = Stepper(run)._with_draws(loader.next_step(), 5)
    loader.close()
    return {(*row.tolist(),): int(draw) for b in batches for row, draw in zip(b["input_ids"], b["draw"], strict=True)}


def test_noise_goes_with_the_row():
    expected = draws(job_of(sources=(Numbers(), Numbers(start=50))))
    assert draws(job_of()) == expected
    one, other = run_on_ranks(2, lambda rank: draws(job_of()))
    assert one | other == expected


def test_without_costs_rows_stay_where_they_are(make_job, build):
    job = make_job()
    run = build(job)
    loader = TrainLoader(job, run.datasets, run.context)
    [batch] = loader.next_step()
    loader.close()
    assert "slots" not in batch


def test_rows_of_a_stream_stay_with_their_lane():
    job = job_of(sources=(Streamed(), Costly(weight=3.0)))
    for batch in rows_of(job, 2):
        for slot, source, ids in zip(*batch, strict=True):
            if source == 0:
                assert ids[0] == NumberSequences(1, 8, 1, slot)[0]["input_ids"][0]


class StopAfter(TrainingHook):
    def on_step_end(self, context):
        if context.step == 2:
            context.request_stop("asked to")


def losses(folder):
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_a_run_that_continues_has_the_same_rows(tmp_path):
    changes = {"steps": 6, "sources": (Costly(sequences=20), Numbers(start=50))}
    whole, halves = job_of(tmp_path / "whole", **changes), job_of(tmp_path / "halves", **changes)
    Trainer(whole, echo=lambda text: None).run()
    Trainer(halves, hooks=[StopAfter()], echo=lambda text: None).run()
    run_on_ranks(2, lambda rank: Trainer(halves, echo=lambda text: None).run().step)
    assert losses(tmp_path / "halves") == pytest.approx(losses(tmp_path / "whole"), abs=1e-12)
