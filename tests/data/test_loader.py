"""Loading: the same samples whatever loads them."""

from __future__ import annotations

import attrs
import pytest
import torch
from attrs import frozen

from forge_core.data.loader import TrainLoader, evaluation_batches, held_out
from forge_core.parallel.layout import Layout
from forge_core.testing import Numbers


def steps(job, run, count, counts=(), context=None):
    loader = TrainLoader(job, run.datasets, context or run.context, counts)
    batches = [torch.cat([b["input_ids"] for b in loader.next_step()]) for _ in range(count)]
    position = loader.counts()
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
    assert sum(end) == 24


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

        return Sequences()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_while_reading_names_source_and_sample(make_job, build, workers):
    job = make_job(data={"sources": (Damaged(),), "workers": workers})
    run = build(job)
    loader = TrainLoader(job, run.datasets, run.context)
    with pytest.raises(OSError, match="disk on fire") as caught:
        loader.next_step()
    loader.close()
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "(source, index)" in told
    assert "(0, " in told


def test_a_source_that_holds_nothing_is_refused(make_job, build):
    from forge_core.errors import JobError

    with pytest.raises(JobError, match=r"data\.sources\.0: holds less than one sequence of 8 tokens"):
        build(make_job(data={"sources": (Numbers(sequences=0),)}))
