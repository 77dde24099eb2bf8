"""Data that is spread unevenly: ranks without a single label, and without anything to evaluate."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from attrs import frozen

from forge_core.contracts.components import DatasetComponent
from forge_core.engine.trainer import Trainer
from forge_plugin_parallel import FSDP, ContextParallel, PipelineParallel, TensorParallel
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import tiny_job
from forge_testing.processes import run_on_ranks


@frozen(kw_only=True)
class Sparse(DatasetComponent):
    """Every label of most sequences is ignored; of the others, all but those of the first positions."""

    def build(self, context):
        length = context.job.train.seq_len
        return SparseSequences(64, length, SparseSequences(1, length, None))


@frozen
class SparseSequences:
    count: int
    length: int
    held_out: object
    bytes_per_token: float | None = None

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        tokens = (index + np.arange(self.length + 1)) % 32
        labels = np.full(self.length, -100)
        if index % 8 == 0:
            labels[:3] = tokens[1:4]
        return {"input_ids": tokens[:-1], "labels": labels}


def numbers(folder, stages, ranks):
    model = Transformer(vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=2))
    settings = {"model": model, "global_batch_size": 8, "precision": "fp64", "seq_len": 16, "eval": {"interval": 2}}
    job = tiny_job(str(folder), None, steps=6, data={"sources": (Sparse(),)}, parallel=stages, **settings)
    run_on_ranks(ranks, lambda rank: Trainer(job, echo=len).run() and None)
    records = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]
    return [
        record[key] for record in records for key in ("loss", "grad_norm", "eval/loss", "eval/tokens") if key in record
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return numbers(tmp_path_factory.mktemp("alone"), {}, 1)


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [
        (4, {}),
        (4, {"fsdp": FSDP()}),
        (4, {"fsdp": FSDP(replicate=2)}),
        (2, {"cp": ContextParallel(degree=2)}),
        (4, {"fsdp": FSDP(), "tp": TensorParallel(degree=2)}),
        (4, {"fsdp": FSDP(), "pp": PipelineParallel(degree=2, schedule="gpipe")}),
    ],
    ids=["replicate4", "fsdp4", "hsdp", "cp2", "fsdp2 x tp2", "fsdp2 x pp2"],
)
def test_nothing_hangs_and_the_numbers_are_right(tmp_path, alone, ranks, stages):
    found = numbers(tmp_path, stages, ranks)
    assert 3 in found, "tokens of the one sequence that is held out"
    assert any(number == 0 for number in found), "a step without any label"
    assert found == pytest.approx(alone, rel=1e-9, abs=1e-15)
