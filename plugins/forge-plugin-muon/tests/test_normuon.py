"""NorMuon against its paper's formulas, and as an optimizer of a job."""

from __future__ import annotations

import math

import pytest
import torch

from forge_plugin_muon import NorMuon
from forge_plugin_muon.newton_schulz import orthogonalise
from forge_plugin_muon.normuon_optimizer import NorMuonOptimizer
from forge_plugin_muon.optimizer import MuonOptimizer
from forge_testing.runs import draw
from forge_testing.suites import OptimizerSuite

ALL_ROWS = {"square": (8, 8), "wide": (6, 12), "tall": (12, 6)}


class TestNorMuon(OptimizerSuite):
    component = NorMuon(lr=0.02, adam_lr=1e-2, adam_eps=1e-5)
    layouts = ("fsdp2", "tp2")  # pp2: test_experts_and_layouts.py


class Reference:
    """Algorithm 1 of arXiv 2510.05491, row by row, with the factor of the authors' repository in place of 0.2 √(mn)."""

    def __init__(self, weight, lr, beta1, beta2, decay):
        self.weight, self.lr, self.beta1, self.beta2, self.decay = weight.clone(), lr, beta1, beta2, decay
        self.momentum, self.moments = torch.zeros_like(weight), [0.0] * len(weight)

    def step(self, gradient):
        self.momentum = self.beta1 * self.momentum + (1 - self.beta1) * gradient
        nesterov = self.beta1 * self.momentum + (1 - self.beta1) * gradient
        left, values, right = torch.linalg.svd(nesterov, full_matrices=False)
        values = values / values.square().sum().sqrt()
        for _ in range(5):  # Newton-Schulz in exact arithmetic
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        orthogonal = left @ values.diag() @ right
        rows = []
        for number, row in enumerate(orthogonal):
            mean = float(row.square().mean())
            self.moments[number] = self.beta2 * self.moments[number] + (1 - self.beta2) * mean
            rows.append(row / math.sqrt(self.moments[number]))
        update = torch.stack(rows)
        update = update * (orthogonal.square().sum() / update.square().sum()).sqrt()
        count, length = self.weight.shape
        self.weight -= self.lr * self.decay * self.weight
        self.weight -= self.lr * math.sqrt(max(1, count / length)) * update


@pytest.mark.parametrize("beta2", [0.95, 0.5])
def test_matrices_are_stepped_as_the_paper_has_it(beta2):
    parameters = [torch.nn.Parameter(draw(name, shape, 9)) for name, shape in ALL_ROWS.items()]
    references = [Reference(parameter.detach(), 0.03, 0.9, beta2, 0.2) for parameter in parameters]
    settings = {"lr": 0.03, "momentum": 0.9, "beta2": beta2, "weight_decay": 0.2}
    optimizer = NorMuonOptimizer(parameters, ns_dtype=torch.float32, **settings)
    for step in range(5):
        for number, (parameter, reference) in enumerate(zip(parameters, references, strict=True)):
            parameter.grad = draw(f"gradient {number}", parameter.shape, step)
            reference.step(parameter.grad)
        optimizer.step()
    for parameter, reference in zip(parameters, references, strict=True):
        torch.testing.assert_close(parameter.detach(), reference.weight, rtol=1e-9, atol=1e-9)


def test_the_first_update_has_rows_of_one_length_and_the_norm_of_muons():
    gradient = draw("gradient", (12, 6), 0)
    parameter = torch.nn.Parameter(torch.zeros(12, 6, dtype=torch.float64))
    parameter.grad = gradient.clone()
    NorMuonOptimizer([parameter], lr=1.0, weight_decay=0, ns_dtype=torch.float32).step()
    lengths = parameter.detach().norm(dim=1)
    torch.testing.assert_close(lengths, lengths[:1].expand(12), rtol=1e-8, atol=0)
    [orthogonal] = orthogonalise([gradient])
    assert orthogonal.norm(dim=1).std() > 0.1
    torch.testing.assert_close(parameter.detach().norm(), orthogonal.norm() * math.sqrt(2), rtol=1e-8, atol=0)


def test_rows_without_a_gradient_stay_and_no_number_is_lost():
    """As of experts that no token reaches."""
    parameter = torch.nn.Parameter(draw("stack", (2, 6, 4), 0))
    optimizer = NorMuonOptimizer([parameter], weight_decay=0)
    before = parameter.detach().clone()
    for step in range(3):
        parameter.grad = draw("gradient", (2, 6, 4), step)
        parameter.grad[0] = 0
        parameter.grad[1, 2] = 0
        optimizer.step()
    assert torch.equal(parameter[0], before[0])
    assert torch.equal(parameter[1, 2], before[1, 2])
    assert parameter.isfinite().all()
    assert not torch.equal(parameter[1], before[1])


def test_without_the_average_of_rows_it_would_be_muon(monkeypatch):
    """All else is Muon's: with rows left as they are, the same bits."""
    ours, theirs = ([torch.nn.Parameter(draw(name, s, 9)) for name, s in ALL_ROWS.items()] for _ in range(2))
    monkeypatch.setattr(NorMuonOptimizer, "_with_equal_rows", lambda self, matrix, update, beta2: update)
    optimizers = NorMuonOptimizer(ours, lr=0.03), MuonOptimizer(theirs, lr=0.03)
    for step in range(3):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            for parameter in pair:
                parameter.grad = draw(f"gradient {number}", parameter.shape, step)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
