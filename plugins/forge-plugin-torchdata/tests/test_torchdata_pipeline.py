"""The dataset `pipeline`: graphs and loaders of the user's own, read in lanes and continued exactly."""

from __future__ import annotations

import json
from itertools import islice

import attrs
import numpy as np
import pytest
import torch

from forge_core.checkpoint.state import Progress
from forge_core.config.rules import check_rules
from forge_core.contracts.errors import DataError
from forge_core.contracts.layout import Layout
from forge_core.data.loader import TrainLoader
from forge_plugin_torchdata import Pipeline
from forge_plugin_torchdata.pipeline import from_json, to_json
from forge_testing import Numbers
from forge_testing.refusals import at, check_problems, naming, refuses

GRAPHS = '''
import numpy as np
import torch
from torchdata.nodes import BaseNode, Batcher, IterableWrapper, MapStyleWrapper, Mapper, ParallelMapper, SamplerWrapper
from torchdata.nodes import MultiNodeWeightedSampler, Prefetcher
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler


def sample(number, seq_len=8):
    tokens = (number + np.arange(seq_len + 1)) % 32
    image = np.full((2, 2), number, np.uint8)
    return {"input_ids": torch.from_numpy(tokens[:-1]), "labels": tokens[1:], "image": image}


class Numbers:
    """Sequences lane, lane + lanes, lane + 2 lanes, …"""

    def __init__(self, lane, count=9):
        self.lane, self.count = lane, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return sample(self.lane.number + self.lane.count * index, self.lane.seq_len)


class Epochs:
    """A sampler that shuffles each epoch in another way."""

    def __init__(self, count, seed):
        self.count, self.seed, self.epoch = count, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(np.random.default_rng([self.seed, self.epoch]).permutation(self.count).tolist())


def graph(lane):
    node = SamplerWrapper(Epochs(9, lane.seed))
    return Prefetcher(ParallelMapper(node, Numbers(lane).__getitem__, num_workers=2, method="thread"), 3)


def mixture(lane):
    nodes = {name: MapStyleWrapper(Numbers(lane, 5), range(5)) for name in "ab"}
    weights = {"a": 1.0, "b": 2.0}
    return MultiNodeWeightedSampler(nodes, weights, rank=lane.number, world_size=lane.count, seed=lane.seed)


def loader(lane, count=9, **options):
    data = Numbers(lane, count)
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(lane.seed))
    return StatefulDataLoader(data, batch_size=None, sampler=sampler, **options)


def parallel_loader(lane):
    return loader(lane, 8, num_workers=2)


def batched(lane):
    return StatefulDataLoader(Numbers(lane), batch_size=2)


def nothing(lane):
    return IterableWrapper([])


def bare(lane):
    return [sample(0)]


def wrong(lane):
    return IterableWrapper([3])


def with_option(lane):
    return IterableWrapper([sample(lane.options["number"])])


class Unsaveable(BaseNode):
    def reset(self, state=None):
        super().reset(state)

    def next(self):
        return sample(0)

    def get_state(self):
        return {"at": object()}


def unsaveable(lane):
    return Unsaveable()
'''


@pytest.fixture
def pipeline(tmp_path):
    """A pipeline of `GRAPHS`, by the name of its factory."""
    (tmp_path / "graphs.py").write_text(GRAPHS)
    return lambda factory, **keys: Pipeline(factory=f"{tmp_path}/graphs.py:{factory}", **keys)


def steps(job, run, count, samples=None, context=None):
    """The rows of some steps, and the position after them."""
    loader = TrainLoader(job, run.datasets, context or run.context, Progress(samples=samples or {}))
    try:
        batches = [loader.next_step() for _ in range(count)]
        return [torch.cat([b["image"][:, 0, 0] for b in step]).tolist() for step in batches], loader.state()
    finally:
        loader.close()


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    ("factory", "lanes", "count", "cuts"),
    [
        # An epoch of a lane has 9 items, and each step takes two of them.
        ("graph", 2, 12, (1, 4, 5, 9)),
        ("mixture", 2, 12, (1, 4, 5, 9)),
        ("loader", 2, 12, (1, 4, 5, 9)),
        # Of 8 items, four per step: each epoch of each lane starts two processes, which are the cost of this test.
        ("parallel_loader", 1, 3, (1, 2)),
    ],
)
def test_a_pipeline_continues_exactly_within_an_epoch_and_at_its_end(
    make_job, build, pipeline, factory, lanes, count, cuts, every
):
    run = build(job := make_job(data={"sources": (pipeline(factory, lanes=lanes, snapshot_every=every),)}))
    whole, end = steps(job, run, count)
    for cut in cuts:
        _, position = steps(job, run, cut)
        rest, same_end = steps(job, run, count - cut, json.loads(json.dumps(position)))
        assert rest == whole[cut:], cut
        assert same_end["drawn"] == end["drawn"]


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 1)])
def test_workers_read_the_lanes_too(make_job, build, pipeline, before, after):
    source = pipeline("graph", lanes=4)
    run = build(job := make_job(data={"sources": (source,)}))
    whole, _ = steps(job, run, 6)
    first, position = steps(make_job(data={"sources": (source,), "workers": before}), run, 2)
    rest, _ = steps(make_job(data={"sources": (source,), "workers": after}), run, 4, position)
    assert first + rest == whole


class FakeMesh:
    """Only what the loader asks of a mesh."""

    def __init__(self, rank):
        self.rank = rank

    def get_local_rank(self, name):
        return self.rank if name == "shard" else 0


def test_ranks_share_out_the_lanes_and_continue_each_other(make_job, build, pipeline):
    run = build(job := make_job(data={"sources": (pipeline("graph", lanes=2),)}))
    whole, position = steps(job, run, 6)
    contexts = [attrs.evolve(run.context, layout=Layout(shard=2), mesh=FakeMesh(rank)) for rank in range(2)]
    parts = [steps(job, run, 6, context=context)[0] for context in contexts]
    assert [one + other for one, other in zip(*parts, strict=True)] == whole
    following = steps(job, run, 3, position)[0]
    parts = [steps(job, run, 3, position, context)[0] for context in contexts]
    assert [one + other for one, other in zip(*parts, strict=True)] == following


def test_epochs_are_those_of_the_pipeline(make_job, build, pipeline):
    run = build(job := make_job(data={"sources": (pipeline("graph"),)}))
    rows = [row for step in steps(job, run, 9)[0] for row in step]
    epochs = [rows[start : start + 9] for start in range(0, 36, 9)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(9))] * 4
    assert epochs[0] != epochs[1]


def test_entries_keep_their_dtype(make_job, build, pipeline):
    run = build(job := make_job(data={"sources": (pipeline("graph"),)}))
    loader = TrainLoader(job, run.datasets, run.context)
    [batch] = loader.next_step()
    loader.close()
    assert (batch["image"].dtype, batch["image"].shape) == (torch.uint8, (4, 2, 2))
    assert batch["input_ids"].dtype == torch.int64


def test_a_run_cut_in_two_equals_the_whole(make_job, train, lines, pipeline):
    sources = (pipeline("graph", lanes=2),)
    whole = lines(train(make_job(steps=8, data={"sources": sources}, job={"name": "whole"})))
    train(make_job(steps=5, data={"sources": sources}))
    rest = lines(train(make_job(steps=8, data={"sources": sources, "workers": 2})))
    assert [line["loss"] for line in rest] == [line["loss"] for line in whole]


def test_it_may_stand_beside_other_sources(make_job, build, pipeline, tmp_path, monkeypatch):
    """By class path, with options."""
    monkeypatch.syspath_prepend(tmp_path)
    pipeline("graph")
    (tmp_path / "graphs.py").rename(tmp_path / "graphs_of_mine.py")
    source = Pipeline(factory="graphs_of_mine:with_option", options={"number": 7})
    [dataset] = build(make_job(data={"sources": (source,)})).datasets
    assert [sample["image"][0, 0] for sample, _ in islice(dataset.read(0, None), 3)] == [7, 7, 7]
    job = make_job(data={"sources": (source, Numbers())})
    run = build(job)
    loader = TrainLoader(job, run.datasets, run.context)
    with pytest.raises(DataError, match=naming("'image'", "lane 0 of source '0'")):
        loader.next_step()
    loader.close()


# --- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "facts"),
    [
        ("batched", ["'input_ids'", "(2, 8)", "(8,)"]),
        ("nothing", ["no items"]),
        ("bare", ["torchdata.nodes.BaseNode", "list"]),
        ("wrong", ["mapping", "int"]),
        ("unsaveable", ["state", "object"]),
    ],
)
def test_what_is_no_pipeline_is_refused_by_name(make_job, build, pipeline, factory, facts):
    run = build(job := make_job(data={"sources": (pipeline(factory),)}))
    with pytest.raises(DataError, match=naming("lane 0 of source '0'", *facts)):
        steps(job, run, 1)


def test_a_factory_that_is_not_there_is_named(make_job, build, catalog, pipeline):
    with refuses("data.sources.0.factory", "graphs.py:grap'", "AttributeError"):
        build(make_job(data={"sources": (pipeline("grap"),)}))
    problems = check_rules(make_job(data={"sources": (Pipeline(factory="graph"),)}), catalog)
    check_problems(problems, at("data.sources.0.factory", "package.module:function", "./file.py:function"))


def test_lanes_must_fit_the_batch_and_the_ranks(make_job, build, pipeline):
    with refuses("data.sources.0", "3 lanes", "train.global_batch_size = 4"):
        build(make_job(data={"sources": (pipeline("graph", lanes=3),)}))


# --- states as JSON ----------------------------------------------------------------------------------------------


def test_a_state_survives_json():
    state = {
        "plain": [1, 2.5, "text", None, True],
        "tuple": (1, (2, b"\x00\xff")),
        "tensor": torch.arange(6, dtype=torch.int16).reshape(2, 3),
        "array": np.arange(4, dtype=np.float32),
        "empty": np.empty((0, 3), np.uint8),
        "scalar": torch.tensor(3.0),
        "numbers": {1: "one", 2: {"forge": "a key of its own"}},
    }
    back = from_json(json.loads(json.dumps(to_json(state))))
    assert back.keys() == state.keys()
    for name in ("tensor", "scalar"):
        assert back[name].dtype == state[name].dtype
        assert torch.equal(back[name], state[name])
    for name in ("array", "empty"):
        assert back[name].dtype == state[name].dtype
        assert np.array_equal(back[name], state[name])
        assert back[name].shape == state[name].shape
    for name in ("plain", "tuple", "numbers"):
        assert back[name] == state[name]
