"""Equal blocks share one compiled graph under every stage, on every rank."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from forge_core.plugins.catalog import Catalog
from forge_plugin_compile import Compile
from forge_plugin_lowbit.float8 import Float8
from forge_plugin_parallel import FSDP, ActivationCheckpointing, ContextParallel, PipelineParallel, TensorParallel
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, tiny_job
from forge_testing.curves import train
from forge_testing.processes import run_on_ranks

FLOAT8 = Float8(recipe="rowwise", exclude=("layers.*.attention.[kv]",))
STAGES = {
    "tp without sequence parallel": {"tp": TensorParallel(degree=2, sequence_parallel=False)},
    "cp by ulysses": {"cp": ContextParallel(degree=2, method="ulysses")},
    "fsdp, checkpointing": {"fsdp": FSDP(), "activation_checkpointing": ActivationCheckpointing()},
    "float8, tp": {"float8": FLOAT8, "tp": TensorParallel(degree=2)},
    "pp": {"pp": PipelineParallel(degree=2)},
}


ALIKE = {"tp without sequence parallel": 0, "cp by ulysses": 1, "fsdp, checkpointing": 0, "float8, tp": 1}
"""Stages under which the ranks trace the same program: one rank compiles, which takes most of the time here."""


def graphs(folder, name, rank):
    """Graphs of three blocks a rank, over two steps and an evaluation."""
    stages = STAGES[name]
    torch._dynamo.reset()
    counters.clear()
    attention = GroupedQueryAttention(heads=4, kv_heads=2, qk_norm=True)
    model = Transformer(attention=attention, vocab_size=32, dim=32, layers=6 if "pp" in stages else 3)
    settings = {"data": {"sources": (Numbers(held_out=5),)}, "steps": 2, "global_batch_size": 8, "seq_len": 16}
    parallel = {**stages, "compile": Compile(backend="eager")} if rank == ALIKE.get(name, rank) else stages
    train(tiny_job(folder, Catalog.installed(), model=model, parallel=parallel, micro_batch_size=4, **settings))
    return counters["stats"]["unique_graphs"]


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("runs"))
    return run_on_ranks(2, lambda rank: {name: graphs(folder, name, rank) for name in STAGES}, timeout=300)


@pytest.mark.parametrize("name", STAGES)
def test_there_is_one_for_training_and_one_for_evaluation(counted, name):
    assert [of_rank[name] for of_rank in counted] == [2 * (rank == ALIKE.get(name, rank)) for rank in range(2)]
