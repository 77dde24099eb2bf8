"""Under bf16, experts are chosen by the same scores whether parameters are sharded or whole."""

from __future__ import annotations

import json

import pytest

from forge_core.data.loader import TrainLoader
from forge_core.engine.build import build_context, build_run
from forge_core.engine.step import Stepper, metrics
from forge_core.engine.trainer import Trainer
from forge_core.plugins.catalog import Catalog
from forge_plugin_moe import MoE, SoftmaxTopK
from forge_plugin_parallel import FSDP, ExpertParallel
from forge_plugin_transformer import Transformer
from forge_testing import Numbers, tiny_job
from forge_testing.processes import run_on_ranks

FIRST_LAYER = "Count(name='moe/load', row=0)"
STAGES = {"fsdp": {"fsdp": FSDP()}, "fsdp/ep": {"fsdp": FSDP(), "ep": ExpertParallel(degree=2)}}


def job(folder, stages, **changes):
    ffn = MoE(experts=8, hidden=16, router=SoftmaxTopK(top_k=2, z_loss=1.0))
    model = Transformer(vocab_size=32, dim=64, layers=2, init_std=0.5, ffn=ffn)
    settings = {"precision": "bf16", "global_batch_size": 8, "seq_len": 16, "steps": 4, "micro_batch_size": 2}
    data = {"sources": (Numbers(ignored=7),)}
    catalog = Catalog.installed()
    return tiny_job(str(folder), catalog, model=model, data=data, parallel=stages, **(settings | changes))


def first_step(folder, stages):
    """What routers report of the first step, and the gradients of their weights."""
    described = job(folder, stages)
    context = build_context(described, Catalog.installed(), None)
    run = build_run(described, context)
    loader = TrainLoader(described, run.datasets, context)
    _, sums = Stepper(run).gradients(loader.next_step(), 0)
    loader.close()
    reported = {str(name): value.tolist() for name, value in metrics(sums).items() if "moe" in str(name)}
    return reported, [item.parameter.grad for item in run.parameters if item.role == "router"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return first_step(tmp_path_factory.mktemp("alone"), {})


@pytest.mark.parametrize("name", STAGES)
def test_routers_see_what_they_see_in_one_process(tmp_path, alone, name):
    for reported, gradients in run_on_ranks(2, lambda rank: first_step(tmp_path, STAGES[name])):
        expected, whole = alone
        # ep adds up what a token's experts return in another order, which the second layer sees.
        assert reported["moe/z_loss"] == pytest.approx(expected["moe/z_loss"], rel=1e-9 if name == "fsdp" else 1e-4)
        same = expected.keys() if name == "fsdp" else [FIRST_LAYER]
        assert all(reported[count] == expected[count] for count in same if count != "moe/z_loss")
        for found, gradient in zip(gradients, whole, strict=True):
            assert (found - gradient).norm() < (1e-2 if name == "fsdp" else 0.2) * gradient.norm()


def test_a_checkpoint_of_sharded_ranks_continues_in_one_process_and_back(tmp_path):
    def train(stages, steps):
        return Trainer(job(tmp_path, stages, steps=steps), echo=lambda text: None).run().step

    def losses(folder):
        lines = (folder / "run/metrics.jsonl").read_text().splitlines()
        return [record["loss"] for record in map(json.loads, lines) if "loss" in record]

    run_on_ranks(2, lambda rank: train(STAGES["fsdp"], 2))
    train({}, 3)
    assert run_on_ranks(2, lambda rank: train(STAGES["fsdp"], 4)) == [4, 4]
    whole = tmp_path / "whole"
    Trainer(job(whole, {}), echo=lambda text: None).run()
    assert losses(tmp_path)[:3] == pytest.approx(losses(whole)[:3], rel=5e-2)
    assert len(losses(tmp_path)) == 4
