"""A stage of a stranger's distribution, which places itself between two of ours."""

from __future__ import annotations

import json

import pytest

from forge_core import load_job
from forge_core.contracts.errors import JobError
from forge_core.engine.trainer import Trainer
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import naming

MODULE = '''
from attrs import frozen
from torch.distributed.tensor import DTensor

from forge_core.contracts.components import ParallelComponent
from forge_core.contracts.runtime import ParallelStage


@frozen(kw_only=True)
class Doubling(ParallelComponent):
    """Doubles what each block adds."""

    after = {"tp": "it wraps blocks whose matrices are split"}
    before = {"activation_checkpointing": "what it does is computed again too"}

    def build(self, context):
        return DoublingStage()


class DoublingStage(ParallelStage):
    def apply(self, model):
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "tp has been there"
        for block in model.layers.values():
            assert "forward" not in vars(block), "activation_checkpointing has not"
            block.forward = Doubled(block.forward)
        return model


class Doubled:
    def __init__(self, forward):
        self.forward = forward

    def __call__(self, carry, batch):
        (x,), (y,) = carry, self.forward(carry, batch)
        return (2 * y - x,)
'''
JOB = """
[job]
name = "strange"
output = "{output}"
[train]
steps = 2
global_batch_size = 4
seq_len = 16
precision = "fp64"
[model]
type = "transformer"
vocab_size = 32
dim = 16
layers = 2
attention.heads = 2
[[data.sources]]
type = "{module}:Numbers"
[optimizer]
type = "adamw"
lr = 1e-2
[parallel.activation_checkpointing]
[parallel.doubling]
[parallel.tp]
degree = 2
"""


@pytest.fixture
def job_file(tmp_path, monkeypatch):
    site = tmp_path / "site"
    info = site / "forge_plugin_doubling-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "doubling.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: forge-plugin-doubling\nVersion: 1.0\n")
    (info / "RECORD").write_text("")
    (info / "entry_points.txt").write_text("[forge.parallel]\ndoubling = doubling:Doubling\n")
    monkeypatch.syspath_prepend(str(site))
    (tmp_path / "job.toml").write_text(JOB.format(output=tmp_path / "runs", module="forge_testing"))
    return tmp_path / "job.toml"


def test_it_stands_where_it_says_and_works(job_file, tmp_path):
    def train(rank):
        said = []
        Trainer(load_job(job_file), echo=said.append).run()
        return "\n".join(said)

    plan = run_on_ranks(2, train)[0]
    order = [line.split()[1] for line in plan.splitlines() if line.startswith("stage ")]
    assert order == ["tp", "doubling", "activation_checkpointing"]
    assert "after tp: it wraps blocks whose matrices are split" in plan
    assert "after doubling: what it does is computed again too" in plan
    lines = (tmp_path / "runs/strange/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "loss" in json.loads(line)] == [1, 2]


def test_a_contradiction_is_named_with_both_reasons(job_file, tmp_path):
    module = tmp_path / "site/doubling.py"
    module.write_text(MODULE.replace('before = {"activation', 'before = {"tp": "it must not", "activation'))
    with pytest.raises(JobError, match=naming("doubling after tp", "tp after doubling (it must not)")):
        load_job(job_file, world_size=2)
