"""Mesh dimensions of a stranger: taps go by what its stage declares, and refuse what it does not."""

from __future__ import annotations

import json
from functools import partial
from typing import ClassVar

import pytest
import taps_stranger as stranger
import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch.nn import functional as F

from forge_core.contracts.components import ParallelComponent
from forge_core.contracts.layout import MeshDimension
from forge_core.contracts.runtime import ParallelStage
from forge_plugin_parallel.collectives import all_reduce, fan_out
from forge_plugin_taps import Statistics, Store
from forge_plugin_taps.store_reader import points_in, read_point, read_tokens, steps_of
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, naming, problems_of

LENGTH = 8
BEFORE = {"taps": "they see what each rank has"}


@frozen(kw_only=True)
class Strange(ParallelComponent):
    """Two ranks along a dimension `strange`."""

    before = BEFORE
    dimensions: ClassVar = (MeshDimension("strange", order=45),)
    axes: tuple[str, ...] | None = ()

    def degrees(self):
        return {"strange": 2}

    def divided_axes(self):
        return {} if self.axes is None else {"strange": self.axes}

    def build(self, context):
        return ParallelStage()


@frozen(kw_only=True)
class Halves(Strange):
    """Each rank has every second position."""

    dimensions: ClassVar = (MeshDimension("strange", tokens=True, order=30),)
    axes: tuple[str, ...] | None = ("positions",)
    has_places: bool = True

    def build(self, context):
        return HalvesStage(self.has_places, context.mesh.get_local_rank("strange"))


class HalvesStage(ParallelStage):
    def __init__(self, has_places, rank):
        self._has_places, self._rank = has_places, rank

    def split(self, batch):
        rows, length = batch["input_ids"].shape
        own = torch.arange(self._rank, length, 2)
        part = {name: x[:, own] if x.shape[1:] == (length,) else x for name, x in batch.items()}
        return {**part, "places": own.expand(rows, -1)} if self._has_places else part


@frozen(kw_only=True)
class Columns(Strange):
    """Each rank has half of the hidden units."""

    axes: tuple[str, ...] | None = ("hidden",)

    def build(self, context):
        return ColumnsStage(context.mesh)


class ColumnsStage(ParallelStage):
    def __init__(self, mesh):
        self._group, self._rank = mesh.get_group("strange"), mesh.get_local_rank("strange")

    def apply(self, model):
        for layer in model.layers.values():
            up, down = layer.pair.up, layer.pair.down
            up.register_forward_hook(lambda module, args, out: fan_out(out, self._group).chunk(2, -1)[self._rank])
            down.forward = partial(self._down, down)
        return model

    def _down(self, module, hidden):
        return all_reduce(F.linear(hidden, module.weight.chunk(2, 1)[self._rank]), self._group)

    def complete_gradients(self, model):
        for layer in model.layers.values():
            dist.all_reduce(layer.pair.down.weight.grad, group=self._group)


def job(folder, stage=None, **changes):
    sinks = {"store": Store(), "statistics": Statistics()}
    stages = {} if stage is None else {"strange": stage}
    settings = {"steps": 2, "seq_len": LENGTH, "positions": "all", "interval": 1, **changes}
    return stranger.job(folder, parallel=stages, sinks=sinks, **settings)


def statistics(folder):
    return [json.loads(line) for line in (folder / "taps/statistics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return stranger.run(job(tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize("stage", [Strange(), Halves(), Columns()], ids=["equal", "positions", "hidden"])
def test_the_store_and_statistics_are_those_of_one_process(tmp_path, alone, stage):
    folder = run_on_ranks(2, lambda rank: stranger.run(job(tmp_path, stage)))[0]
    steps = [*zip(steps_of(folder), steps_of(alone), strict=True)]
    assert len(steps) == 2
    for found, expected in steps:
        for name, tokens in read_tokens(expected).items():
            assert torch.equal(read_tokens(found)[name], tokens), name
        assert points_in(found) == points_in(expected)
        for name in points_in(expected):
            torch.testing.assert_close(read_point(found, name), read_point(expected, name), rtol=0, atol=1e-12)
    for found, expected in zip(statistics(folder), statistics(alone), strict=True):
        for name, figures in expected["points"].items():
            own = found["points"][name]
            assert own.pop("histogram") == figures["histogram"], name
            assert own == pytest.approx({key: own for key, own in figures.items() if key != "histogram"}, rel=1e-9)


@pytest.mark.parametrize(
    ("stage", "facts"),
    [
        (Strange(axes=None), ["no stage"]),
        (Halves(axes=None), ["no stage"]),
        (Halves(axes=()), ["positions"]),
        (Strange(axes=("colour",)), ["'colour'"]),
    ],
)
def test_what_is_not_declared_is_refused_when_the_job_is_checked(tmp_path, stage, facts):
    check_problems(problems_of(job(tmp_path, stage), 2), at("parallel.taps", *facts))


@frozen(kw_only=True)
class Other(Strange):
    """Two ranks along another dimension."""

    dimensions: ClassVar = (MeshDimension("other", order=46),)

    def degrees(self):
        return {"other": 2}

    def divided_axes(self):
        return {"other": self.axes}


@pytest.mark.parametrize(("one", "two"), [("hidden", "heads"), ("positions", "positions")])
def test_two_dimensions_that_divide_the_same_are_refused(tmp_path, one, two):
    made = job(tmp_path, Strange(axes=(one,)))
    made = evolve(made, parallel={**made.parallel, "other": Other(axes=(two,))})
    what = "positions" if one == "positions" else "features"
    check_problems(problems_of(made, 4), at("parallel.taps", "strange", "other", what))
    made = evolve(made, parallel={**made.parallel, "other": Other()})
    check_problems(problems_of(made, 4))


def test_a_stage_without_an_order_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Strange, "before", {})
    check_problems(problems_of(job(tmp_path, Columns()), 2), at("parallel.taps", "parallel.strange"))


def test_divided_positions_without_places_are_refused_by_name(tmp_path):
    with pytest.raises(AssertionError, match=naming("`split`", "`places`")):
        run_on_ranks(2, lambda rank: stranger.run(job(tmp_path, Halves(has_places=False))))
