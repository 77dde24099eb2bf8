"""Loading: the same samples whatever loads them."""

from __future__ import annotations

import json
import os
import signal
import time
from itertools import islice

import attrs
import numpy as np
import pytest
import torch
from attrs import frozen

from forge_core.checkpoint.state import Progress
from forge_core.contracts.components import DatasetComponent, LoaderComponent
from forge_core.contracts.errors import DataError, JobError, Problem
from forge_core.contracts.layout import Layout
from forge_core.data.loader import TrainLoader, evaluation_batches, held_out
from forge_kit.data.document_streams import StreamedDocument, packed
from forge_testing import Numbers
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import naming, refuses
from forge_testing.runs import tiny_run
from forge_testing.tiny import NumberSequences


def steps(job, run, count, counts=(), context=None):
    loader = TrainLoader(job, run.datasets, context or run.context, Progress(samples=counts or {}))
    batches = [torch.cat([b["input_ids"] for b in loader.next_step()]) for _ in range(count)]
    position = loader.state()
    loader.close()
    return batches, position


def test_order_does_not_depend_on_workers_or_micro_batches(make_job, build):
    sources = {"sources": (Numbers(weight=2.0), Numbers(start=100, sequences=9))}
    found = []
    for workers, size in ((0, 4), (0, 1), (2, 2)):
        job = make_job(micro_batch_size=size, data={**sources, "workers": workers})
        found.append(steps(job, build(job), 5))
    assert all(position == found[0][1] for _, position in found)
    for batches, _ in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(batches, found[0][0], strict=True))


def test_loading_continues_from_the_counts(make_job, build):
    job = make_job(data={"sources": (Numbers(), Numbers(start=100, weight=0.3))})
    run = build(job)
    whole, _ = steps(job, run, 6)
    first, position = steps(job, run, 2)
    rest, end = steps(job, run, 4, position)
    assert all(torch.equal(a, b) for a, b in zip(whole, first + rest, strict=True))
    assert end["drawn"] == 24


class FakeMesh:
    """Only what the loader asks of a mesh."""

    def __init__(self, rank):
        self.rank = rank

    def get_local_rank(self, name):
        return self.rank if name == "shard" else 0


def test_ranks_share_out_the_same_global_batch(make_job, build):
    job = make_job(global_batch_size=8)
    run = build(job)
    whole, _ = steps(job, run, 3)
    parts = []
    for rank in range(2):
        context = attrs.evolve(run.context, layout=Layout(shard=2), mesh=FakeMesh(rank))
        parts.append(steps(job, run, 3, context=context)[0])
    for step in range(3):
        assert torch.equal(torch.cat([parts[0][step], parts[1][step]]), whole[step])


def test_evaluation_shares_out_every_sequence_once_in_batches_of_equal_shape(make_job, build):
    job = make_job(global_batch_size=6, micro_batch_size=3, data={"sources": (Numbers(held_out=8),)})
    run = build(job)
    valid, batches = 0, []
    for rank in range(2):
        context = attrs.evolve(run.context, layout=Layout(shard=2), mesh=FakeMesh(rank))
        mine = list(evaluation_batches(held_out(run.datasets), 0, job, context))
        batches.append(mine)
        valid += sum(int((b["labels"] != -100).sum()) for b in mine)
    assert valid == 8 * 8
    assert len(batches[0]) == len(batches[1])
    assert {tuple(b["labels"].shape) for part in batches for b in part} == {(3, 8)}


@frozen(kw_only=True)
class Damaged(Numbers):
    def build(self, context):
        class Sequences:
            held_out, bytes_per_token = None, None

            def __len__(self):
                return 8

            def __getitem__(self, index):
                raise OSError("disk on fire")

            def where(self, index):
                return "ashes"

        return Sequences()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_while_reading_names_source_and_sample(make_job, build, workers):
    job = make_job(data={"sources": (Damaged(),), "workers": workers})
    run = build(job)
    loader = TrainLoader(job, run.datasets, run.context)
    with pytest.raises(DataError, match=r"\bsequence \d\b.*source '0'.*\bashes\b.*OSError: disk on fire") as caught:
        loader.next_step()
    loader.close()
    assert "in __getitem__" in "".join(caught.value.__notes__)


@frozen(kw_only=True)
class Fatal(Numbers):
    """Reading sequence 5 kills the process that does it."""

    def build(self, context):
        class Sequences(NumberSequences):
            def __getitem__(self, index):
                if index == 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().__getitem__(index)

        return Sequences(8, 8, 1, 0)


def test_the_death_of_a_worker_names_what_it_was_reading(make_job, build):
    job = make_job(data={"sources": (Fatal(),), "workers": 2})
    run = build(job)
    loader = TrainLoader(job, run.datasets, run.context)
    with pytest.raises(DataError, match=naming("worker", "sequence 5", "source '0'")):
        [loader.next_step() for _ in range(4)]
    loader.close()


@frozen(kw_only=True)
class Short(LoaderComponent):
    """Ends before the run does."""

    units: int

    def build(self, context, reader, units, units_per_step):
        return (reader.read(rows) for rows in islice(units, self.units))


def test_a_loader_that_ends_before_the_run_is_named(make_job, build):
    job = make_job(data={"loader": Short(units=2)})
    loader = TrainLoader(job, build(job).datasets, build(job).context)
    assert len([loader.next_step(), loader.next_step()]) == 2
    with pytest.raises(DataError, match=naming("[data.loader]")):
        loader.next_step()
    loader.close()


def test_a_source_that_holds_nothing_is_refused(make_job, build):
    with refuses("data.sources.0", "train.seq_len = 8"):
        build(make_job(data={"sources": (Numbers(sequences=0),)}))


@frozen(kw_only=True)
class Missing(DatasetComponent):
    def documents(self):
        raise JobError([Problem("path", "does not exist")])

    def build(self, context):
        return list(self.documents())


def test_what_is_wrong_with_a_source_is_told_with_its_table(make_job, build):
    with refuses("data.sources.1.path", "does not exist"):
        build(make_job(data={"sources": (Numbers(), Missing())}))


class CountingStream:
    """Lane n gives documents of n, n + lanes, n + 2 lanes, …: `length` tokens each, all with the document's number."""

    held_out = None

    def __init__(self, lanes, length=5):
        self.lanes, self._length = lanes, length

    def read(self, lane, position):
        number = (position or {"next": 0})["next"]
        while True:
            document = lane + self.lanes * number
            yield StreamedDocument(np.full(self._length, document), None, {"next": number})
            number += 1


@frozen(kw_only=True)
class Counting(DatasetComponent):
    lanes: int = 4

    def build(self, context):
        return packed(CountingStream(self.lanes), context)


def rows_of(job, run, count, state=None, context=None):
    """The inputs of each row of the global batch, one after the other."""
    loader = TrainLoader(job, run.datasets, context or run.context, Progress(samples=state or {}))
    steps = [torch.cat([b["input_ids"] for b in loader.next_step()]) for _ in range(count)]
    state = loader.state()
    loader.close()
    return torch.stack(steps, dim=1).flatten(1), state


@pytest.mark.parametrize("workers", [0, 2])
def test_each_row_of_the_batch_reads_on_in_its_lane(make_job, build, workers):
    job = make_job(data={"sources": (Counting(),), "workers": workers})
    rows, _ = rows_of(job, build(job), 5)
    for lane in range(4):
        assert rows[lane].tolist() == [lane + 4 * (i // 5) for i in range(40)]


@pytest.mark.parametrize("workers", [0, 2, 3])
def test_streams_continue_from_the_state_whatever_reads_them(make_job, build, workers):
    sources = (Counting(lanes=4, weight=2.0), Numbers(), Counting(lanes=2))
    job = make_job(data={"sources": sources, "workers": workers})
    run = build(job)
    whole, _ = rows_of(make_job(data={"sources": sources}), run, 7)
    first, state = rows_of(job, run, 3)
    rest, _ = rows_of(job, run, 4, json.loads(json.dumps(state)))
    assert torch.equal(torch.cat([first, rest], dim=1), whole)


def test_lanes_continue_on_another_number_of_ranks_and_back(make_job, build):
    """Each rank knows the positions of its own lanes only, and a checkpoint those of all."""
    job = make_job(data={"sources": (Counting(),)})
    whole, _ = rows_of(job, build(job), 5)
    first, state = rows_of(job, build(job), 1)

    def two_steps(rank):
        run = tiny_run("unused", data={"sources": (Counting(),)})
        return rows_of(run.job, run, 2, json.loads(json.dumps(state)))

    (upper, state_0), (lower, state_1) = run_on_ranks(2, two_steps)
    assert state_0 == state_1
    last, _ = rows_of(job, build(job), 2, json.loads(json.dumps(state_0)))
    assert torch.equal(torch.cat([first, torch.cat([upper, lower]), last], dim=1), whole)


def test_ranks_share_out_the_lanes(make_job, build):
    job = make_job(data={"sources": (Counting(),)})
    run = build(job)
    whole, _ = rows_of(job, run, 3)
    parts = [
        rows_of(job, run, 3, context=attrs.evolve(run.context, layout=Layout(shard=2), mesh=FakeMesh(rank)))[0]
        for rank in range(2)
    ]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("lanes", [3, 8])
def test_lanes_must_divide_the_global_batch(make_job, build, lanes):
    with refuses("data.sources.0", f"{lanes} lanes", "train.global_batch_size = 4"):
        build(make_job(data={"sources": (Counting(lanes=lanes),)}))


@frozen(kw_only=True)
class Slow(Numbers):
    seconds: float

    def build(self, context):
        seconds = self.seconds

        class Sequences(NumberSequences):
            def __getitem__(self, index):
                time.sleep(seconds)
                return super().__getitem__(index)

        return Sequences(8, 8, 1, 0)


def test_every_line_tells_the_share_of_time_spent_waiting_for_data(make_job, train, lines):
    records = lines(train(make_job(data={"sources": (Slow(seconds=0.1),)}, steps=5)))
    assert all(0 <= record["data_wait"] <= 1 for record in records)
    assert max(record["data_wait"] for record in records) > 0.3  # 0.95 where nothing else slows the steps down
