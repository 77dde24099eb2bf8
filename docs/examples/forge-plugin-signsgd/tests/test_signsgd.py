"""signSGD by itself, and in runs that take a moment."""

import pytest
import torch
from forge_plugin_signsgd import SignSGD
from forge_plugin_signsgd.optimizer import SignSGDOptimizer


def test_every_weight_moves_by_the_rate_against_the_sign_of_its_gradient():
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))
    optimizer = SignSGDOptimizer([{"params": [weight]}], lr=0.25, momentum=0.0)
    weight.grad = torch.tensor([8.0, -0.5, 0.0])
    optimizer.step()
    assert weight.tolist() == [0.75, 1.25, 1.0]


def test_a_rate_of_zero_is_refused():
    with pytest.raises(ValueError, match="'lr' must be > 0"):
        SignSGD(lr=0.0)


def test_the_loss_falls(make_job, train, lines):
    summary = train(make_job(optimizer=SignSGD(lr=3e-3), steps=40))
    losses = [line["loss"] for line in lines(summary)]
    assert sum(losses[-4:]) < sum(losses[:4])


def test_a_run_that_stops_and_continues_has_the_same_losses(make_job, train, lines):
    def job(name, steps):
        return make_job(optimizer=SignSGD(), job={"name": name}, steps=steps)

    whole = lines(train(job("whole", steps=8)))
    train(job("parts", steps=4))
    parts = lines(train(job("parts", steps=8)))
    assert [line["loss"] for line in parts] == [line["loss"] for line in whole]
