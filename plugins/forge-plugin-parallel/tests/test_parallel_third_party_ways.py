"""A way of a stranger's, by which tensor parallel splits a module of theirs, and things that are no way."""

from __future__ import annotations

import pytest
import torch
from attrs import frozen
from torch import nn
from torch.nn import functional as F

from forge_plugin_parallel import TensorParallel
from forge_plugin_parallel.tp_ways import Way
from forge_testing import Numbers, SplittableModel, tiny_job
from forge_testing.curves import Difference, train
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, problems_of
from forge_testing.tiny_model import SplittableNetwork

PER_FEATURE = Way("per_feature", split={"weight": 0}, inside=True)


class Scale(nn.Module):
    """A factor for each feature."""

    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features))

    def init_parameter(self, name, fill):
        fill.normal(0.5, 1.0)

    def init_buffers(self, device):
        pass

    def forward(self, x):
        return x * self.weight.to(x.dtype)


class ScaledNetwork(SplittableNetwork):
    """Scales the hidden units between the matrices of a pair, of which each rank has some."""

    way = PER_FEATURE

    def __init__(self, dim, *args):
        super().__init__(dim, *args)
        for layer in self.layers.values():
            layer.pair.scale = Scale(2 * dim)
            layer.pair.forward = lambda x, pair=layer.pair: pair.down(pair.scale(F.relu(pair.up(x))))

    def tensor_parallel_plan(self):
        return {"layers.*.scale": self.way, **super().tensor_parallel_plan()}


class Strange(ScaledNetwork):
    way = ("split", 0)


class Twice(ScaledNetwork):
    """Its way takes the positions of this rank only, where a module around it has all."""

    way = Way("at_rest", partial="with sequence parallel")


class Unsummed(ScaledNetwork):
    """Its way sums what the module does not compute."""

    way = "split_features"


@frozen(kw_only=True)
class Scaled(SplittableModel):
    network: str = "ScaledNetwork"

    def build(self, context):
        return globals()[self.network](self.dim, self.layers, 32, context.dtype)


def job(folder, stages, **model):
    data = {"sources": (Numbers(ignored=7, held_out=5),)}
    return tiny_job(
        str(folder), model=Scaled(layers=2, **model), data=data, parallel=stages, precision="fp64", seq_len=16, steps=3
    )


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_it_splits_the_module_and_changes_nothing(tmp_path, sequence_parallel):
    stages = {"tp": TensorParallel(degree=2, sequence_parallel=sequence_parallel)}
    alone = train(job(tmp_path / "alone", {}))
    for rank in run_on_ranks(2, lambda _: train(job(tmp_path / "tp", stages))):
        difference = Difference.between(rank, alone)
        assert difference.initial == 0
        assert max(difference.loss, difference.norm, difference.gradient, difference.evaluation) < 1e-9, difference


def problems(tmp_path, network):
    return problems_of(job(tmp_path, {"tp": TensorParallel(degree=2)}, network=network), 2)


def test_what_is_no_way_is_refused_by_name(tmp_path):
    assert problems(tmp_path, "ScaledNetwork") == []
    ways = "column, row, partial_row"
    first = problems(tmp_path, "Strange")[:1]
    check_problems(first, at("parallel.tp", "Strange", "('split', 0)", ways))


def test_it_is_checked_like_the_ways_of_the_stage(tmp_path):
    names = ("at_rest", "'layers.0.pair.scale'", "'layers.0.pair'", "replicate")
    check_problems(problems(tmp_path, "Twice"), at("parallel.tp", "Twice", *names))


def test_a_way_is_refused_for_a_module_without_the_method_that_it_extends(tmp_path):
    names = ("split_features", "'layers.0.pair.scale'", "Scale", "sum_features")
    check_problems(problems(tmp_path, "Unsummed"), at("parallel.tp", "Unsummed", *names))
