"""`ramp.py`: the momentum of Muon in a run, and what it does to the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import define

from forge_core import Catalog, TrainingHook
from forge_testing.suites import SchedulerSuite

Ramp = Catalog.installed().load("scheduler", f"{Path(__file__).with_name('ramp.py')}:Ramp")

RAMP = """
train = { precision = "fp64", grad_clip_norm = 0.0 }
[optimizer]
type = "muon"
[optimizer.momentum]
type = "PROOFS/ramp.py:Ramp"
start = 0.5
end = 0.9
steps = 2
"""


class TestRamp(SchedulerSuite):
    component = Ramp(start=0.85, end=0.95, steps=300)


@define(kw_only=True, slots=False)
class Watch(TrainingHook):
    """Gradient of a matrix before each update; momentum, and the average that Muon keeps of it, after it."""

    name = "layers.0.up.weight"

    def __attrs_post_init__(self):
        self.gradients, self.momenta, self.averages = [], [], []  # no fields: those would be state

    def on_gradients(self, context):
        self.gradients.append(dict(context.model.named_parameters())[self.name].grad.clone())

    def on_step_end(self, context):
        group = next(group for group in context.optimizer.param_groups if self.name in group["names"])
        self.momenta.append(group["momentum"])
        (average,) = context.optimizer.state[group["params"][group["names"].index(self.name)]].values()
        self.averages.append(average.clone())


def test_the_momentum_of_muon_follows_it(job_of, train):
    watch = Watch()
    train(job_of("ramp", RAMP), watch)
    assert watch.momenta == pytest.approx([0.5, 0.7, 0.9, 0.9])
    average = torch.zeros_like(watch.gradients[0])
    for gradient, momentum, found in zip(watch.gradients, [0.5, 0.7, 0.9, 0.9], watch.averages, strict=True):
        average = momentum * average + (1 - momentum) * gradient
        torch.testing.assert_close(found, average, rtol=1e-9, atol=1e-12)
