"""NorMuon and Dion of a model with experts: one result under layouts that cut matrices, stacks and layers."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.engine.trainer import Trainer
from forge_kit.tools.checkpoints import stored_tensors
from forge_kit.tools.whole_tensors import read_whole
from forge_plugin_moe import MoE, SigmoidTopK
from forge_plugin_muon import Dion, NorMuon
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import tiny_job
from forge_testing.catalogs import installed
from forge_testing.laws import Case, layout_law
from forge_testing.layouts import LAYOUTS
from forge_testing.processes import run_on_ranks
from forge_testing.runs import advance, tiny_run, whole_tensors

MODEL = Transformer(
    dim=16,
    layers=2,
    vocab_size=32,
    attention=GroupedQueryAttention(heads=4, kv_heads=2),
    ffn=MoE(experts=4, hidden=16, router=SigmoidTopK(bias_rate=0.01)),
)
SIZES = {"seq_len": 16, "global_batch_size": 8, "micro_batch_size": 2, "precision": "fp64"}
OPTIMIZERS = {"normuon": NorMuon(lr=0.1), "dion": Dion(lr=0.05)}
OWNED = {"normuon": "second_momentum_buffer", "dion": "right_factor"}


def observing(name):
    def trained(folder, changes):
        """Weights after three steps, and the state of whole matrices that this rank has."""
        run = tiny_run(folder, optimizer=OPTIMIZERS[name], model=MODEL, **SIZES | changes)
        advance(run, 3)
        weights = whole_tensors({item.name: item.parameter for item in run.parameters}, run.context.mesh)
        slots = [slot for state in run.optimizer.state.values() for slot in state if slot.startswith(OWNED[name])]
        return weights, len(slots)

    return trained


def same_weights_and_divided_state(ranks, alone):
    """Each matrix has one owner: 4 of attention and 4 x 3 of experts in both layers."""
    expected, all_of_them = alone
    assert all_of_them == 2 * (4 + 12)
    for weights, _ in ranks:
        assert weights.keys() == expected.keys()
        for key, weight in expected.items():
            torch.testing.assert_close(weights[key], weight, rtol=1e-8, atol=1e-9, msg=key)
    assert sum(share for _, share in ranks) == all_of_them
    assert all(share for _, share in ranks)


test_layouts = layout_law(
    *(
        Case(name, observe=observing(name), compare=same_weights_and_divided_state, layouts=("fsdp2_ep2", "pp2"))
        for name in OPTIMIZERS
    )
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_continues_under_another_layout(tmp_path, name):
    """The state of the owners is found by ranks that own other matrices."""

    def train(which, layout, steps):
        parallel = LAYOUTS[layout].changes(installed()) if layout else {}
        settings = {"model": MODEL, "optimizer": OPTIMIZERS[name], "steps": steps, "gc_interval": 0}
        job = tiny_job(str(tmp_path / which), **settings | SIZES | parallel)

        def last_step(rank):
            return Trainer(job, echo=len).run().step

        run_on_ranks(LAYOUTS[layout].ranks, last_step) if layout else last_step(0)

    for steps, layout in enumerate(["", "fsdp2_ep2", ""], 1):
        train("chain", layout, steps)
    train("one", "", 3)
    chain, one = (tmp_path / which / "run/checkpoints/step-3" for which in ("chain", "one"))
    stored = stored_tensors(one)
    assert stored == stored_tensors(chain)
    assert len([key for key in stored if OWNED[name] in key]) == 32
    found, expected = read_whole(chain, stored, stored), read_whole(one, stored, stored)
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-7, atol=1e-9, msg=key)


class HostReads(TorchDispatchMode):
    """Counts numbers that are read from tensors."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_number_is_read_from_the_device(tmp_path, name):
    run = tiny_run(tmp_path, optimizer=OPTIMIZERS[name], model=MODEL, **SIZES)
    for item in run.parameters:
        item.parameter.grad = torch.ones_like(item.parameter)
    with HostReads() as reads:
        run.optimizer.step()
        assert reads.count == 0
        float(run.parameters[0].parameter.sum())
        assert reads.count == 1
    assert not run.job.optimizer.waits()
