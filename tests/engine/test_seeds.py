"""Randomness inside a step: a function of the seed, the step and the part of the global batch."""

from __future__ import annotations

import pytest
import torch
from attrs import define, field

from forge_core.contracts.components import TrainingHook
from forge_core.parallel.stages import Replicate
from forge_plugin_parallel import TensorParallel
from forge_testing import SplittableModel
from forge_testing.processes import run_on_ranks


@define(kw_only=True, slots=False)
class Draws(TrainingHook):
    """Keeps what the default generator gives after the forward pass of each step."""

    drawn: list = field(init=False, factory=list)

    def on_gradients(self, context):
        self.drawn.append(torch.rand(4).tolist())


def drawn(make_job, train, **changes):
    hook = Draws()
    train(make_job(steps=2, **changes), hook)
    return hook.drawn


def test_each_step_draws_anew_and_the_same_run_the_same_again(make_job, train):
    first, second = drawn(make_job, train, job={"name": "one"})
    assert first != second
    assert drawn(make_job, train, job={"name": "other"}) == [first, second]


def test_another_seed_draws_otherwise(make_job, train):
    assert drawn(make_job, train, job={"name": "one"}) != drawn(make_job, train, job={"name": "two", "seed": 7})


@pytest.mark.parametrize(
    ("stages", "same"), [({"replicate": Replicate()}, False), ({"tp": TensorParallel(degree=2)}, True)]
)
def test_ranks_draw_the_same_where_they_compute_the_same_tokens_only(make_job, train, stages, same):
    one, other = run_on_ranks(2, lambda rank: drawn(make_job, train, parallel=stages, model=SplittableModel()))
    assert (one == other) is same
