"""Experts with optimizers, averages, precision and routers of other people."""

from __future__ import annotations

import json

import attrs
import pytest
import torch

from forge_core.auxiliary import Count
from forge_core.config.load import load_job
from forge_core.data.loader import TrainLoader
from forge_core.engine.step import Stepper
from forge_core.engine.trainer import Trainer
from forge_core.testing.processes import run_on_ranks
from forge_core.testing.runs import advance, tiny_run, whole
from forge_plugin_lion import Lion
from forge_plugin_lowbit import AdamW8bit
from forge_plugin_moe import MoE, SigmoidTopK
from forge_plugin_muon import Muon
from forge_plugin_parallel import FSDP, ExpertParallel, PipelineParallel
from forge_plugin_schedule_free import ScheduleFreeAdamW
from forge_plugin_soap import SOAP
from forge_plugin_transformer import GroupedQueryAttention, SwiGLU, Transformer

MODEL = Transformer(
    dim=16,
    layers=2,
    vocab_size=32,
    attention=GroupedQueryAttention(heads=4, kv_heads=2),
    ffn=MoE(experts=4, hidden=16, router=SigmoidTopK(bias_rate=0.01), shared_experts=1),
)
SIZES = {"seq_len": 16, "global_batch_size": 8, "micro_batch_size": 2, "precision": "fp64"}
OPTIMIZERS = {
    "muon": Muon(ns_dtype="fp32", lr=0.1),
    "soap": SOAP(lr=0.02, precondition_frequency=2),
    "lion": Lion(lr=0.003, cautious=True),
    "schedule_free_adamw": ScheduleFreeAdamW(lr=0.05),
    "adamw_8bit": AdamW8bit(lr=0.05, min_size=1, block_size=8, compile=False),
}
LAYOUTS = {
    "fsdp2/ep2": (2, {"fsdp": FSDP(), "ep": ExpertParallel(degree=2)}),
    "fsdp4/ep2": (4, {"fsdp": FSDP(), "ep": ExpertParallel(degree=2)}),
    "fsdp2 x pp2/ep2": (
        4,
        {"fsdp": FSDP(), "pp": PipelineParallel(degree=2, schedule="gpipe"), "ep": ExpertParallel(degree=2)},
    ),
}


def weights(folder, stages):
    """What three steps of each optimizer come to, of the layers that this rank has."""
    found = {}
    for name, optimizer in OPTIMIZERS.items():
        run = tiny_run(folder, model=MODEL, optimizer=optimizer, parallel=stages, **SIZES)
        advance(run, 3)
        found[name] = {item.name: whole(item.parameter) for item in run.parameters}
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return weights(tmp_path_factory.mktemp("alone"), {})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_optimizer_trains_experts_alike(tmp_path, alone, layout):
    """Matrices of a stack by themselves, wherever they are."""
    ranks, stages = LAYOUTS[layout]
    by_rank = run_on_ranks(ranks, lambda rank: weights(tmp_path, stages), timeout=120)
    for name, expected in alone.items():
        seen = {key: tensor for found in by_rank for key, tensor in found[name].items()}
        assert seen.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(seen[key], tensor, rtol=1e-7, atol=1e-8, msg=f"{layout}, {name}: {key}")


def layers_counted(folder):
    stages = {"pp": PipelineParallel(degree=2, schedule="gpipe")}
    model = attrs.evolve(MODEL, layers=12)
    run = tiny_run(folder, model=model, parallel=stages, **SIZES)
    stepper, loader = Stepper(run), TrainLoader(run.job, run.datasets, run.context)
    _, sums = stepper.gradients(loader.next_step(), 0)
    loader.close()
    return [name.row for name in sums if isinstance(name, Count) and name.name == "moe/load"]


def test_every_rank_of_a_pipeline_has_the_counts_of_all_layers_in_their_order(tmp_path):
    assert run_on_ranks(2, lambda rank: layers_counted(tmp_path)) == [list(range(12))] * 2


ROUTER = """
import torch
from attrs import frozen
from forge_core import RouterComponent
from forge_core.modules import Linear


class Best(torch.nn.Module):
    experts_per_token = 1

    def __init__(self, dim, experts):
        super().__init__()
        self.scores = Linear(dim, experts)

    def forward(self, x, batch):
        weights, experts = self.scores(x.to(torch.promote_types(x.dtype, torch.float32))).softmax(-1).topk(1)
        return weights, experts


@frozen(kw_only=True)
class MyRouter(RouterComponent):
    def build(self, context, dim, experts):
        return Best(dim, experts)
"""
JOB = """
[train]
steps = 4
global_batch_size = 8
micro_batch_size = 2
seq_len = 16
precision = "fp64"
[model]
type = "transformer"
dim = 16
layers = 2
vocab_size = 32
[model.attention]
heads = 2
[model.ffn]
type = "moe"
experts = 4
hidden = 16
[model.ffn.router]
type = "./my_router.py:MyRouter"
[optimizer]
type = "adamw"
[[data.sources]]
type = "forge_core.testing:Numbers"
"""


def test_a_router_in_a_file_works_under_every_layout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_router.py").write_text(ROUTER)
    stages = ["[parallel.fsdp]", "[parallel.pp]\ndegree = 2", "[parallel.ep]\ndegree = 2"]
    (tmp_path / "one.toml").write_text(JOB + '[job]\nname = "one"\n')
    (tmp_path / "four.toml").write_text(JOB + "\n".join(stages) + '\n[job]\nname = "four"\n')
    run_on_ranks(1, lambda rank: Trainer(load_job("one.toml"), echo=len).run().step)
    run_on_ranks(4, lambda rank: Trainer(load_job("four.toml", world_size=4), echo=len).run().step)
    one, four = (
        [json.loads(line)["loss"] for line in (tmp_path / f"runs/{name}/metrics.jsonl").read_text().splitlines()[:4]]
        for name in ("one", "four")
    )
    assert one == pytest.approx(four, rel=1e-9)


def test_pipelines_are_cut_by_what_a_token_meets(tmp_path):
    """Each layer with experts has eight times the weights of a dense one, of which a token meets as many."""
    ffn = MoE(experts=16, hidden=16, first_dense=4, dense=SwiGLU(hidden=32))
    model = attrs.evolve(MODEL, layers=8, ffn=ffn)

    def cut(rank):
        run = tiny_run(tmp_path, model=model, parallel={"pp": PipelineParallel(degree=2)}, **SIZES)
        return run.built_stages[0].describe()

    assert run_on_ranks(2, cut) == ["1f1b, stages of 4, 4 layers"] * 2
