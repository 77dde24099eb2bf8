"""Documents that are learned apart do not meet in a choice among all tokens of a sequence."""

from __future__ import annotations

import pytest
import torch

from forge_core.config.rules import check_rules
from forge_core.contracts.errors import ForgeError
from forge_core.plugins.catalog import Catalog
from forge_plugin_moe import ExpertChoice, MoE, SoftmaxTopK
from forge_plugin_text.packing import BestFit, Isolate
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import tiny_job
from forge_testing.documents import RandomDocuments
from forge_testing.refusals import naming
from forge_testing.runs import tiny_run

OVER_SEQUENCES = {
    "capacity": (MoE(experts=4, hidden=16, capacity_factor=1.0), "model.ffn.capacity_factor"),
    "expert choice": (MoE(experts=4, hidden=16, router=ExpertChoice()), "model.ffn.router.type"),
}


def model_of(ffn):
    return Transformer(dim=16, layers=1, vocab_size=32, attention=GroupedQueryAttention(heads=2), ffn=ffn)


def problems_of(tmp_path, ffn, **data):
    data = {"sources": (RandomDocuments(),), **data}
    job = tiny_job(str(tmp_path), Catalog.installed(), model=model_of(ffn), data=data, seq_len=16)
    return [str(problem.path) for problem in check_rules(job, Catalog.installed())]


@pytest.mark.parametrize("packing", [Isolate(), BestFit()])
@pytest.mark.parametrize(("ffn", "path"), OVER_SEQUENCES.values(), ids=OVER_SEQUENCES)
def test_a_job_that_would_join_isolated_documents_is_refused(tmp_path, ffn, path, packing):
    assert problems_of(tmp_path, ffn, packing=packing) == [path]


@pytest.mark.parametrize("ffn", [ffn for ffn, _ in OVER_SEQUENCES.values()], ids=OVER_SEQUENCES)
def test_documents_that_are_joined_anyhow_may_compete(tmp_path, ffn):
    assert problems_of(tmp_path, ffn) == []


def test_tokens_that_choose_for_themselves_do_not_join_documents(tmp_path):
    assert problems_of(tmp_path, MoE(experts=4, hidden=16, router=SoftmaxTopK()), packing=Isolate()) == []


@pytest.mark.parametrize("ffn", [ffn for ffn, _ in OVER_SEQUENCES.values()], ids=OVER_SEQUENCES)
def test_documents_of_a_dataset_are_refused_where_they_come(tmp_path, ffn):
    layer = tiny_run(tmp_path, model=model_of(ffn), seq_len=16).model.layers["0"].ffn
    layer.train()
    batch = {"input_ids": torch.zeros(1, 16, dtype=torch.int64), "document_ids": torch.zeros(1, 16, dtype=torch.int64)}
    with pytest.raises(ForgeError, match=naming("documents")):
        layer(torch.randn(1, 16, 16), batch)
