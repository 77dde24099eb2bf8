"""The stage `activation_offload`: the same bits, with what blocks save somewhere else."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from attrs import evolve
from torch import nn

from forge_core.parallel.mesh import leave_group
from forge_core.plugins.catalog import Catalog
from forge_plugin_compile import Compile
from forge_plugin_compile.offload import ActivationOffload
from forge_plugin_compile.offload import saved_tensors as offload
from forge_plugin_compile.offload.saved_tensors import Mover, Offloaded
from forge_plugin_moe import MoE, SigmoidTopK
from forge_plugin_parallel import ActivationCheckpointing
from forge_plugin_parallel.pp import splits_backward
from forge_plugin_plan.estimate import make_plan
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import tiny_job
from forge_testing.laws import Case, layout_law
from forge_testing.layouts import LAYOUTS, LayoutCase
from forge_testing.refusals import at, check_problems, problems_of
from forge_testing.runs import advance, draw, tiny_run, whole_tensors
from forge_testing.suites import StageSuite

CPU = torch.device("cpu")
MODEL = Transformer(dim=16, layers=3, vocab_size=32, attention=GroupedQueryAttention(heads=4, kv_heads=2))


class TestActivationOffload(StageSuite):
    component = ActivationOffload(min_mb=0)
    # Kernels of a CPU may round differently for another place in memory
    loss_tolerance = 1e-14
    weights_tolerance = 1e-13


def trained(stages, folder):
    run = tiny_run(folder, model=MODEL, parallel=stages, seq_len=16, global_batch_size=4, micro_batch_size=2)
    advance(run, 3)
    return {item.name: item.parameter.detach().clone() for item in run.parameters}


@pytest.mark.parametrize("every", [1, 2])
def test_weights_are_the_same_and_tensors_do_move(tmp_path, monkeypatch, every):
    moved = []
    to_host = Mover.to_host
    monkeypatch.setattr(Mover, "to_host", lambda self, tensor: moved.append(tensor.nbytes) or to_host(self, tensor))
    expected = trained({}, tmp_path / "without")
    assert not moved
    found = trained({"activation_offload": ActivationOffload(min_mb=0, every=every)}, tmp_path / "with")
    assert len(moved) > 20
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=1e-14, msg=name)


def test_only_large_activations_move_and_weights_never(monkeypatch):
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    moved = []
    to_host = Mover.to_host
    monkeypatch.setattr(Mover, "to_host", lambda self, tensor: moved.append(tensor.shape) or to_host(self, tensor))

    def gradient(least, rows):
        x = draw("x", (rows, 8), 0).requires_grad_()
        Offloaded(block.forward, Mover(CPU, least), block)(x).square().sum().backward()
        return x.grad

    gradient(100 * 64, rows=10)
    assert moved == []
    gradient(100 * 64, rows=100)
    # The input, and the result of tanh, for itself and for the second layer; the square is outside of the block
    assert moved == [torch.Size([100, 8])] * 3


def test_the_device_holds_what_was_saved_only_in_the_backward_pass():
    """Activations are freed in the forward pass, and again right after their use."""
    alive: list[int] = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x * 1.0
            ctx.save_for_backward(y)
            alive.append(y.untyped_storage()._weak_ref())
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            (y,) = ctx.saved_tensors
            return 2 * y * gradient

    x = draw("x", (64, 8), 0).requires_grad_()
    identity = nn.Identity()
    for times, kept in ((0, False), (1 << 40, True)):
        alive.clear()
        result = Offloaded(Square.apply, Mover(CPU, times), identity)(x)
        freed = torch.UntypedStorage._expired(alive[0])
        assert freed is not kept
        x.grad = None
        result.sum().backward()
        torch.testing.assert_close(x.grad, 2 * x.detach(), rtol=0, atol=0)
        torch.UntypedStorage._free_weak_ref(alive[0])


@pytest.mark.parametrize("view", [
    lambda x: x.mT, lambda x: x[:, 2:5], lambda x: x[:1].expand(8, 8), lambda x: x.reshape(2, 4, 8)[:, 1],
])  # fmt: skip
def test_strides_come_back(view):
    block = nn.Identity()
    seen = []
    unpack = offload.unpack
    x = draw("x", (8, 8), 0).requires_grad_()
    saved = offload.SavedOfBlock(Mover(CPU, 0), block)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda packed: seen.append(unpack(packed)) or seen[-1]):
        viewed = view(x)
        result = viewed.square()
    result.sum().backward(retain_graph=True)
    assert (seen[0].stride(), seen[0].shape) == (viewed.stride(), viewed.shape)
    assert torch.equal(seen[0], viewed)
    first, x.grad = x.grad, None
    result.sum().backward()  # once more: the tensor returns again
    assert torch.equal(x.grad, first)


def test_a_copy_of_a_block_has_separate_weights():
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double()
    block.forward = Offloaded(block.forward, Mover(CPU, 0), block)
    twin = copy.deepcopy(block)
    with torch.no_grad():
        twin[0].weight.zero_()
        twin[0].bias.zero_()
    assert not twin(draw("x", (4, 8), 0)).any()
    assert block(draw("x", (4, 8), 0)).any()


def test_no_cycle_keeps_the_graph_alive():
    gc.disable()
    try:
        count = len([each for each in gc.get_objects() if isinstance(each, offload.Waiting)])
        block = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double()
        result = Offloaded(block.forward, Mover(CPU, 0), block)(draw("x", (4, 8), 0).requires_grad_())
        assert len([each for each in gc.get_objects() if isinstance(each, offload.Waiting)]) > count
        del result
        assert len([each for each in gc.get_objects() if isinstance(each, offload.Waiting)]) == count
    finally:
        gc.enable()


# --- layouts -----------------------------------------------------------------------------------------------------


EXPERTS = Transformer(
    dim=16,
    layers=2,
    vocab_size=32,
    attention=GroupedQueryAttention(heads=4, kv_heads=2),
    ffn=MoE(experts=4, hidden=16, router=SigmoidTopK()),
)
PARTS = LayoutCase(ranks=2, parallel={"pp": {"degree": 2, "schedule": "zbv"}}, micro_batch_size=2)
"""A pipeline whose backward pass unpacks tensors twice: for the gradients of inputs, and later for those of weights."""


def observing(model):
    def weights(folder, changes):
        stages = {**changes.get("parallel", {}), "activation_offload": ActivationOffload(min_mb=0)}
        sizes = {"seq_len": 16, "global_batch_size": 8, "micro_batch_size": 2, "precision": "fp64"}
        run = tiny_run(folder, model=model, **sizes | changes | {"parallel": stages if changes else {}})
        advance(run, 2)
        return whole_tensors({item.name: item.parameter for item in run.parameters}, run.context.mesh)

    return weights


def same_weights(ranks, alone):
    for weights in ranks:
        for key, weight in alone.items():
            torch.testing.assert_close(weights[key], weight, rtol=1e-9, atol=1e-10, msg=key)


LAYOUTS_OF_ALL = {name: LAYOUTS[name] for name in ("fsdp2", "tp2", "pp2", "cp2")}
if splits_backward(torch.__version__):
    LAYOUTS_OF_ALL["zbv"] = PARTS
test_layouts = layout_law(
    Case("offload", observe=observing(evolve(MODEL, layers=4)), compare=same_weights, layouts=LAYOUTS_OF_ALL),
    Case("experts", observe=observing(EXPERTS), compare=same_weights, layouts=("fsdp2_ep2",)),
)


# --- jobs --------------------------------------------------------------------------------------------------------


def test_a_plan_has_less_memory_for_activations(tmp_path):
    def activations(stages):
        leave_group()  # of an earlier test
        sizes = {"seq_len": 128, "global_batch_size": 4, "micro_batch_size": 4}
        job = tiny_job(str(tmp_path), Catalog.installed(), model=MODEL, parallel=stages, **sizes)
        (rank,) = make_plan(job, Catalog.installed(), 1).ranks
        assert not rank.failure
        return rank.memory.peak

    without, moved = activations({}), activations({"activation_offload": ActivationOffload(min_mb=0)})
    small_ones_stay = activations({"activation_offload": ActivationOffload(min_mb=100)})
    assert moved < 0.7 * without
    assert small_ones_stay == pytest.approx(without, rel=0.02)


@pytest.mark.parametrize(("name", "stage"), [
    ("compile", Compile(backend="eager")), ("activation_checkpointing", ActivationCheckpointing()),
])  # fmt: skip
def test_stages_that_hide_what_they_save_are_refused(tmp_path, name, stage):
    stages = {name: stage, "activation_offload": ActivationOffload()}
    job = tiny_job(str(tmp_path), Catalog.installed(), parallel=stages)
    check_problems(problems_of(job), at("parallel.activation_offload", f"parallel.{name}"))


def test_more_than_the_layers_is_refused(tmp_path):
    stages = {"activation_offload": ActivationOffload(every=4)}
    job = tiny_job(str(tmp_path), Catalog.installed(), model=MODEL, parallel=stages)
    check_problems(problems_of(job), at("parallel.activation_offload.every", "4", "3"))
