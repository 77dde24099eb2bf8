"""Dion against its paper's formulas, and as an optimizer of a job."""

from __future__ import annotations

import math

import pytest
import torch

from forge_core.parallel.mesh import leave_group
from forge_core.plugins.catalog import Catalog
from forge_plugin_muon import Dion
from forge_plugin_muon.dion_optimizer import DionOptimizer, rank_of
from forge_plugin_parallel import FSDP
from forge_plugin_plan.estimate import make_plan
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import tiny_job
from forge_testing.refusals import naming
from forge_testing.runs import draw, tiny_run
from forge_testing.suites import OptimizerSuite

SHAPES = {"square": (8, 8), "wide": (6, 12), "tall": (12, 6)}


class TestDion(OptimizerSuite):
    component = Dion(lr=0.02, rank_fraction=0.5, adam_lr=1e-2, adam_eps=1e-5)
    layouts = ("fsdp2", "tp2")  # pp2: test_experts_and_layouts.py


class Reference:
    """Algorithm 1 of arXiv 2504.05295, with Gram-Schmidt, column by column, in place of a library's decomposition."""

    def __init__(self, weight, right, lr, mu, decay):
        self.weight, self.right = weight.clone(), right.clone()
        self.momentum, self.lr, self.mu, self.decay = torch.zeros_like(weight), lr, mu, decay

    def step(self, gradient):
        buffer = self.momentum + gradient
        left = []
        for column in (buffer @ self.right).mT:
            for _ in range(2):  # a second time for what rounding left
                for earlier in left:
                    column = column - (earlier @ column) * earlier
            left.append(column / column.norm())
        left = torch.stack(left, dim=1)
        projected = buffer.mT @ left
        self.momentum = buffer - (1 - self.mu) * left @ projected.mT
        self.right = torch.stack([column / column.norm() for column in projected.mT], dim=1)
        rows, columns = self.weight.shape
        self.weight = (1 - self.lr * self.decay) * self.weight
        self.weight = self.weight - self.lr * math.sqrt(rows / columns) * left @ self.right.mT


@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_matrices_are_stepped_as_the_paper_has_it(fraction):
    parameters = [torch.nn.Parameter(draw(name, shape, 9)) for name, shape in SHAPES.items()]
    twins = [parameter.detach().clone() for parameter in parameters]
    settings = {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.2}
    optimizer = DionOptimizer(parameters, rank_fraction=fraction, **settings)
    for parameter in parameters:  # only makes the first right factors, which are random
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    references = []
    for parameter, twin in zip(parameters, twins, strict=True):
        torch.testing.assert_close(parameter.detach(), twin * (1 - 0.03 * 0.2), rtol=0, atol=1e-15)
        right = optimizer.state[parameter]["right_factor"]
        assert right.shape == (parameter.shape[1], math.ceil(fraction * min(parameter.shape)))
        references.append(Reference(parameter.detach(), right, 0.03, 0.9, 0.2))
    for step in range(5):
        for number, (parameter, reference) in enumerate(zip(parameters, references, strict=True)):
            parameter.grad = draw(f"gradient {number}", parameter.shape, step)
            reference.step(parameter.grad)
        optimizer.step()
    for parameter, reference in zip(parameters, references, strict=True):
        torch.testing.assert_close(parameter.detach(), reference.weight, rtol=1e-8, atol=1e-9)
        state = optimizer.state[parameter]
        torch.testing.assert_close(state["momentum_buffer"], reference.momentum, rtol=1e-8, atol=1e-9)


def test_the_momentum_keeps_what_an_update_leaves_out():
    """Of a gradient with two directions and updates of rank 1: the weaker one adds up until it is the stronger."""
    left, right = (torch.linalg.qr(draw(name, (8, 2), 0))[0] for name in ("left", "right"))
    parameter = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.float64))
    optimizer = DionOptimizer([parameter], lr=1.0, momentum=0.5, weight_decay=0, rank_fraction=1 / 8)
    weakest = []
    for _ in range(24):
        parameter.grad = left @ torch.tensor([4.0, 1.0], dtype=torch.float64).diag() @ right.mT
        before = parameter.detach().clone()
        optimizer.step()
        weakest.append(float(-left[:, 1] @ (parameter.detach() - before) @ right[:, 1]))
    assert max(weakest[:3]) < 0.5
    assert max(weakest) > 0.9


def test_rounding_of_a_gradient_of_lower_rank_is_no_direction():
    """The rounding of a layout, here another one in the last digits, leaves the weights alone."""
    weights, factors = [], []
    for nudge in (0.0, 1e-16):
        parameter = torch.nn.Parameter(torch.zeros(8, 6, dtype=torch.float64))
        optimizer = DionOptimizer([parameter], lr=1.0, weight_decay=0, rank_fraction=1.0)
        for step in range(3):
            parameter.grad = torch.outer(draw("left", (8,), step), draw("right", (6,), 0))
            parameter.grad += nudge * draw("noise", (8, 6), step)
            optimizer.step()
        weights.append(parameter.detach())
        factors.append(optimizer.state[parameter]["right_factor"])
    assert int((torch.linalg.svdvals(weights[0]) > 1e-9).sum()) == 1
    torch.testing.assert_close(*weights, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(*factors, rtol=1e-10, atol=1e-12)


def test_no_gradient_means_no_update_and_the_factor_stays():
    parameter = torch.nn.Parameter(draw("stack", (2, 6, 4), 0))
    optimizer = DionOptimizer([parameter], weight_decay=0, rank_fraction=0.5)
    before = parameter.detach().clone()
    factors = []
    for step in range(3):
        parameter.grad = draw("gradient", (2, 6, 4), step)
        parameter.grad[0] = 0
        optimizer.step()
        factors.append(optimizer.state[parameter]["right_factor-0"].clone())
    assert torch.equal(parameter[0], before[0])
    assert not torch.equal(parameter[1], before[1])
    assert torch.equal(factors[0], factors[2])
    assert factors[0].any()
    assert parameter.isfinite().all()


def test_stacked_matrices_are_treated_one_by_one():
    stack = torch.nn.Parameter(draw("stack", (3, 6, 4), 0))
    single = [torch.nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    optimizers = DionOptimizer([stack]), DionOptimizer(single)
    for step in range(4):
        for parameter in (stack, *single):
            parameter.grad = torch.zeros_like(parameter)
        if step:
            stack.grad = draw("gradient", (3, 6, 4), step)
            for number, parameter in enumerate(single):
                parameter.grad = stack.grad[number].clone()
        for optimizer in optimizers:
            optimizer.step()
        if not step:  # names differ, and with them the factors that are drawn
            for number, parameter in enumerate(single):
                optimizers[1].state[parameter]["right_factor"] = (
                    optimizers[0].state[stack][f"right_factor-{number}"].clone()
                )
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in single]), rtol=0, atol=0)


@pytest.mark.parametrize(("fraction", "rank"), [(0.1, 3), (0.25, 8), (1.0, 30), (0.001, 1)])
def test_the_rank_is_a_share_of_the_shorter_side(fraction, rank):
    assert rank_of((40, 30), fraction) == rank_of((30, 40), fraction) == rank


def test_a_plan_counts_the_state_of_the_owners(tmp_path):
    model = Transformer(dim=16, layers=2, vocab_size=32, attention=GroupedQueryAttention(heads=4, kv_heads=2))
    settings = {"optimizer": Dion(), "model": model, "seq_len": 16, "global_batch_size": 8, "micro_batch_size": 2}
    leave_group()  # of an earlier test
    job = tiny_job(str(tmp_path), Catalog.installed(), parallel={"fsdp": FSDP()}, **settings)
    plan = make_plan(job, Catalog.installed(), 2)
    assert not plan.ranks[0].failure
    run = tiny_run(tmp_path, **settings)
    for item in run.parameters:
        item.parameter.grad = torch.zeros_like(item.parameter)
    run.optimizer.step()
    state = sum(t.nbytes for s in run.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    assert 0.3 * state < plan.ranks[0].optimizer < 0.7 * state


def test_another_rank_is_refused_where_a_run_continues(make_job, train):
    train(make_job(optimizer=Dion(rank_fraction=0.5), steps=1))
    with pytest.raises(Exception, match=naming("rank_fraction")):
        train(make_job(optimizer=Dion(rank_fraction=0.25), steps=2))


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_a_share_that_cannot_be_is_refused(fraction):
    with pytest.raises(ValueError, match="rank_fraction"):
        Dion(rank_fraction=fraction)
