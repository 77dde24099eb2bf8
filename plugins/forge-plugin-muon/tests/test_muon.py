"""Muon against torch's, and against itself under every layout."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from attrs import define, frozen

from forge_core.contracts.components import ParameterGroup, SchedulerComponent, TrainingHook
from forge_core.parallel.mesh import leave_group
from forge_core.plugins.catalog import Catalog
from forge_plugin_muon import Muon, newton_schulz
from forge_plugin_muon import optimizer as optimizer_module
from forge_plugin_muon.newton_schulz import orthogonalise
from forge_plugin_muon.optimizer import MuonOptimizer
from forge_plugin_plan.estimate import make_plan
from forge_plugin_plan.storages import Purpose
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import TinyModel, tiny_job
from forge_testing.laws import Case, layout_law
from forge_testing.memory import peak_of
from forge_testing.refusals import naming
from forge_testing.runs import advance, draw, tiny_run, whole_tensors

JORDAN = (3.4445, -4.7750, 2.0315)


@pytest.mark.parametrize("scaling", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_are_stepped_as_by_torch_and_the_rest_as_by_adamw(tmp_path, scaling, nesterov):
    # bf16 on every processor, as torch has it.
    component = Muon(lr=0.03, scaling=scaling, nesterov=nesterov, weight_decay=0.2, adam_lr=0.01, ns_dtype="bf16")
    run = tiny_run(tmp_path, optimizer=component, model=TinyModel(layers=3))
    twin = dict(copy.deepcopy(run.model).named_parameters())
    roles = {item.name: item.role for item in run.parameters}
    matrices = [name for name, role in roles.items() if role == "matrix"]
    assert len(matrices) == 6
    muon = torch.optim.Muon(
        [twin[n] for n in matrices], lr=0.03, weight_decay=0.2, nesterov=nesterov, adjust_lr_fn=scaling
    )
    groups = [
        {"params": [twin[n] for n, role in roles.items() if n not in matrices and decays(role)], "weight_decay": 0.1},
        {"params": [twin[n] for n, role in roles.items() if n not in matrices and not decays(role)], "weight_decay": 0},
    ]
    adam = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=True)
    for step in range(5):
        for item in run.parameters:
            item.parameter.grad = draw(item.name, item.parameter.shape, step).float()
            twin[item.name].grad = item.parameter.grad.clone()
        run.optimizer.step()
        muon.step()
        adam.step()
    for item in run.parameters:
        torch.testing.assert_close(item.parameter, twin[item.name], rtol=0, atol=0)


def test_a_state_dict_is_taken_back_whole(tmp_path):
    """As torch's own optimizers do: Forge restores state in place, a script calls `load_state_dict`."""
    before, after = (tiny_run(tmp_path, optimizer=Muon(lr=0.03, adam_lr=0.01), model=TinyModel()) for _ in range(2))
    for step in range(2):
        set_gradients(before, step)
        before.optimizer.step()
    after.optimizer.load_state_dict(copy.deepcopy(before.optimizer.state_dict()))
    after.model.load_state_dict(before.model.state_dict())
    for run in (before, after):
        set_gradients(run, 2)
        run.optimizer.step()
    for one, other in zip(before.parameters, after.parameters, strict=True):
        assert torch.equal(one.parameter, other.parameter), one.name


def set_gradients(run, step):
    for item in run.parameters:
        item.parameter.grad = draw(item.name, item.parameter.shape, step).float()


def decays(role):
    return role not in ("norm", "bias", "embedding")


@pytest.mark.parametrize("shape", [(8, 8), (4, 12), (12, 4)])
def test_singular_values_go_through_the_polynomial(shape):
    """In exact arithmetic, the iteration changes nothing but singular values, each by the polynomial."""
    matrices = [draw(f"matrix {number}", shape, 0) for number in range(3)]
    for matrix, found in zip(matrices, orthogonalise(matrices, JORDAN, 5, 1e-7), strict=True):
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        values = values / values.norm()
        for _ in range(5):
            values = JORDAN[0] * values + JORDAN[1] * values**3 + JORDAN[2] * values**5
        torch.testing.assert_close(found, left @ values.diag() @ right, rtol=1e-9, atol=1e-9)


def test_many_matrices_are_worked_on_in_parts(monkeypatch):
    matrices = [draw(f"matrix {number}", (4, 6), 0) for number in range(5)]
    together = orthogonalise(matrices, JORDAN, 5, 1e-7)
    monkeypatch.setattr("forge_plugin_muon.newton_schulz.TOGETHER", 50)
    torch.testing.assert_close(orthogonalise(matrices, JORDAN, 5, 1e-7), together)


# --- without a job -----------------------------------------------------------------------------------------------


def test_plain_tensors_are_stepped_as_by_torch():
    ours, theirs = (
        [torch.nn.Parameter(draw("matrix", (8, 4), 0)), torch.nn.Parameter(draw("bias", (8,), 0))] for _ in range(2)
    )
    optimizer = MuonOptimizer(ours[:1], ours[1:], lr=0.03, momentum=0.9, adam_lr=0.01, ns_dtype=torch.bfloat16)
    references = (
        torch.optim.Muon(theirs[:1], lr=0.03, momentum=0.9, weight_decay=0.1),
        torch.optim.AdamW(theirs[1:], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
    )
    for step in range(4):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            for parameter in pair:
                parameter.grad = draw(f"gradient {number}", parameter.shape, step)
        optimizer.step()
        for reference in references:
            reference.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(("scaling", "share"), [("original", 0.15), ("match_rms_adamw", 1.0)])
def test_the_rate_of_the_rest_follows_from_that_of_matrices(tmp_path, scaling, share):
    """One rate is enough to swap another optimizer for this one; the plan shows the other."""
    component = Muon(lr=0.04, scaling=scaling)
    run = tiny_run(tmp_path, optimizer=component, model=TinyModel())
    rates = {name: group["lr"] for group in run.optimizer.param_groups for name in group["names"]}
    for item in run.parameters:
        assert rates[item.name] == pytest.approx(0.04 if item.role == "matrix" else 0.04 * share), item.name
    (shown,) = [value for what, value, _ in component.choices(run.context) if what == "adam_lr"]
    assert float(shown) == pytest.approx(0.04 * share)


def test_a_rate_that_is_given_for_the_rest_is_taken(tmp_path):
    component = Muon(lr=0.04, adam_lr=3e-4)
    run = tiny_run(tmp_path, optimizer=component, model=TinyModel())
    assert {group["lr"] for group in run.optimizer.param_groups} == {0.04, 3e-4}
    assert not [what for what, _, _ in component.choices(run.context) if what == "adam_lr"]


@pytest.mark.parametrize(
    ("scaling", "lr", "is_small"),
    [("original", 3e-3, True), ("original", 0.02, False), ("match_rms_adamw", 3e-3, False)],
)
def test_a_rate_left_from_adamw_is_pointed_out(tmp_path, scaling, lr, is_small):
    component = Muon(lr=lr, scaling=scaling)
    run = tiny_run(tmp_path, optimizer=component, model=TinyModel())
    whys = [why for what, _, why in component.choices(run.context) if what == "lr"]
    assert bool(whys) is is_small
    assert all("0.02" in why and "match_rms_adamw" in why for why in whys)


def test_groups_may_have_settings_of_their_own():
    together, alone = ([torch.nn.Parameter(draw(f"{n}", (6, 4), 0)) for n in range(2)] for _ in range(2))
    settings = [{"lr": 0.5, "nesterov": False}, {"ns_steps": 3}]
    optimizers = [MuonOptimizer([{"params": [p], **own} for p, own in zip(together, settings, strict=True)])]
    optimizers += [MuonOptimizer([p], **own) for p, own in zip(alone, settings, strict=True)]
    for parameter in (*together, *alone):
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(together, alone, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_takes_the_memory_of_a_batch_and_the_same_bits(dtype, monkeypatch):
    monkeypatch.setattr(newton_schulz, "TOGETHER", 2 * 64 * 64)
    shapes = [(64, 64), (64, 128), (128, 64), (4, 64, 64)] * 4

    def train(working_bytes):
        parameters = [torch.nn.Parameter(draw(f"{n}", shape, 0).float()) for n, shape in enumerate(shapes)]
        optimizer = MuonOptimizer(parameters, ns_dtype=dtype, working_bytes=working_bytes)
        for step in range(2):
            for number, parameter in enumerate(parameters):
                parameter.grad = draw(f"gradient {number}", parameter.shape, step).float()
            peak = peak_of(optimizer.step)
        return parameters, peak

    everything = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
    (at_once, much), (in_batches, little) = train(everything), train(everything // 8)
    torch.testing.assert_close(in_batches, at_once, rtol=0, atol=0)
    assert little < everything < much


def test_a_plan_counts_the_memory_of_a_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(newton_schulz, "TOGETHER", 64 * 64)
    model = Transformer(dim=64, layers=6, vocab_size=32, attention=GroupedQueryAttention(heads=4, kv_heads=2))
    leave_group()  # of an earlier test: a plan is made by a process of its own

    def temporary(working_gb):
        sizes = {"seq_len": 8, "global_batch_size": 1, "micro_batch_size": 1}
        optimizer = Muon(working_gb=working_gb, ns_dtype="bf16")
        job = tiny_job(str(tmp_path), Catalog.installed(), model=model, optimizer=optimizer, **sizes)
        (rank,) = make_plan(job, Catalog.installed(), 1).ranks
        return rank.memory.most[Purpose.OTHER], rank.weights

    (much, weights), (little, _) = temporary(1.0), temporary(1e-5)
    assert much > 0.8 * weights
    assert little < 0.2 * weights


def test_a_vector_among_matrices_is_refused():
    with pytest.raises(ValueError, match=naming("[3]", "`others`")):
        MuonOptimizer([torch.nn.Parameter(torch.zeros(3))])


# --- layouts -----------------------------------------------------------------------------------------------------


MODEL = Transformer(
    dim=16, layers=2, vocab_size=32, attention=GroupedQueryAttention(heads=4, kv_heads=2), tie_embeddings=True
)


def trained(folder, changes):
    """Weights after two steps, and how many matrices this rank has orthogonalised itself."""
    sizes = {"seq_len": 16, "global_batch_size": 8, "precision": "fp64"}
    run = tiny_run(folder, optimizer=Muon(ns_dtype="fp32", lr=0.1), model=MODEL, **sizes, **changes)
    advance(run, 2)
    weights = whole_tensors({item.name: item.parameter for item in run.parameters}, run.context.mesh)
    return weights, len(run.optimizer.matrices.owned(range(len(run.parameters))))


def same_weights_and_divided_work(ranks, alone):
    """Each matrix is orthogonalised by one rank alone, and no rank does twice its share."""
    expected, all_of_them = alone
    for weights, _ in ranks:
        assert weights.keys() == expected.keys()
        for key, weight in expected.items():
            torch.testing.assert_close(weights[key], weight, rtol=1e-9, atol=1e-10, msg=key)
    shares = [share for _, share in ranks]
    assert sum(shares) == all_of_them == 14
    assert max(shares) < 2 * all_of_them / len(shares)


NAMES = ("hsdp2x2", "fsdp2_tp2")
test_layouts = layout_law(
    Case("muon", observe=trained, compare=same_weights_and_divided_work, layouts=NAMES),
)


# --- training ----------------------------------------------------------------------------------------------------


def test_momentum_may_follow_a_schedule(make_job, train):
    seen = []

    @define(kw_only=True, slots=False)
    class Watch(TrainingHook):
        def on_step_end(self, context):
            seen.append(context.optimizer.param_groups[0]["momentum"])

    train(make_job(optimizer=Muon(momentum=Falling())), Watch())
    assert seen == [0.9, 0.8, 0.7, 0.6]


@frozen(kw_only=True)
class Falling(SchedulerComponent):
    def build(self, context):
        return lambda step, total: round(0.9 - 0.1 * step, 3)


def test_patterns_change_the_rate_of_both_kinds(make_job, build):
    run = build(make_job(optimizer=Muon(groups=(ParameterGroup(match="layers.0.*", lr=0.5),))))
    rates = {name: group["lr"] for group in run.optimizer.param_groups for name in group["names"]}
    assert rates["layers.0.up.weight"] == rates["layers.0.up.bias"] == 0.5
    assert (rates["layers.1.up.weight"], rates["layers.1.up.bias"]) == (0.02, pytest.approx(3e-3))


@pytest.mark.parametrize(("precision", "native", "dtype"), [
    ("bf16", True, torch.bfloat16), ("bf16", False, torch.float32),
    ("fp32", True, torch.float32), ("fp64", True, torch.float64),
])  # fmt: skip
def test_the_iteration_is_as_precise_as_the_job(make_job, build, monkeypatch, precision, native, dtype):
    for module in ("newton_schulz", "optimizer"):
        fast = torch.bfloat16 if native else torch.float32
        monkeypatch.setattr(f"forge_plugin_muon.{module}.fast_dtype", lambda device, fast=fast: fast)
    run = build(make_job(optimizer=Muon(), precision=precision))
    seen = set()
    for item in run.parameters:
        item.parameter.grad = torch.ones_like(item.parameter, dtype=item.parameter.grad_dtype)
    orthogonalise = optimizer_module.orthogonalise
    with monkeypatch.context() as patch:
        patch.setattr(optimizer_module, "orthogonalise", lambda m, *a: seen.add(m[0].dtype) or orthogonalise(m, *a))
        run.optimizer.step()
    assert seen == {dtype}
    [(_, choice, why)] = [line for line in run.job.optimizer.choices(run.context) if line[0] == "Newton-Schulz"]
    assert choice.startswith("bfloat16" if dtype == torch.bfloat16 else "float32")
    assert ("precision" in why) == (precision != "bf16")


def test_a_frozen_matrix_stays_and_trains_once_it_is_unfrozen(make_job, build):
    run = build(make_job(optimizer=Muon()))
    items = {item.name: item.parameter for item in run.parameters}
    frozen_one, other = items["layers.0.up.weight"], items["layers.0.down.weight"]
    before = frozen_one.detach().clone(), other.detach().clone()
    other.grad = torch.ones_like(other)
    run.optimizer.step()
    assert torch.equal(frozen_one, before[0])
    assert not torch.equal(other, before[1])
    frozen_one.grad = torch.ones_like(frozen_one)
    run.optimizer.step()
    assert not torch.equal(frozen_one, before[0])


@pytest.mark.parametrize("momentum", [1.0, -0.1])
def test_a_momentum_that_cannot_be_is_refused(momentum):
    with pytest.raises(ValueError, match=naming(">= 0", "< 1", momentum)):
        Muon(momentum=momentum)
