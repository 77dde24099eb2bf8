"""`retention.py`: a stranger's linear attention has one curve under every layout, and equals its recurrence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from forge_core import Catalog
from forge_plugin_text.packing import Isolate
from forge_testing import RandomDocuments, curves, tiny_job
from forge_testing.catalogs import installed
from forge_testing.curves import same_curve
from forge_testing.laws import Case, layout_law
from forge_testing.layouts import LayoutCase
from forge_testing.refusals import refuses
from forge_testing.suites import ModelSuite

FILE = Path(__file__).with_name("retention.py")
Retention = Catalog.installed().load("attention", f"{FILE}:Retention")
retention = sys.modules[Retention.__module__]
Transformer = Catalog.installed().load("model", "transformer")

MODEL = """
[model]
type = "transformer"
dim = 16
layers = 2
vocab_size = 32
[model.attention]
type = "PROOFS/retention.py:Retention"
heads = 4
"""


class TestRetention(ModelSuite):
    component = Transformer(vocab_size=48, dim=16, layers=2, attention=Retention(heads=4))
    layouts = ("fsdp2", "tp2", "pp2")


def observe(folder, changes):
    data = {"sources": (RandomDocuments(),), "packing": Isolate()}
    settings = {"model": TestRetention.component, "data": data, "global_batch_size": 4, "seq_len": 48}
    return curves.train(
        tiny_job(str(folder), installed(), steps=3, precision="fp64", **settings, **changes), installed()
    )


test_packed_documents_on_ranks_with_some_positions_each = layout_law(
    Case(
        "retention",
        observe=observe,
        compare=same_curve,
        layouts={
            method: LayoutCase(ranks=2, parallel={"cp": {"degree": 2, "method": method}})
            for method in ("ring", "ulysses")
        },
    )
)


@pytest.mark.parametrize("chunk", [1, 3, 32])
def test_the_recurrence_is_its_definition(chunk, monkeypatch):
    monkeypatch.setattr(retention.Recurrence, "chunk", chunk)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 11, 2, 4, dtype=torch.float64)
    logits = torch.tensor([0.3, 2.0], dtype=torch.float64)
    batch = {"document_ids": torch.tensor([[5] * 11, [0] * 4 + [1] * 3 + [0] * 4])}
    expected, state = torch.zeros_like(q), torch.zeros(2, 2, 4, 4, dtype=torch.float64)
    for t in range(11):
        begins = batch["document_ids"][:, t] != batch["document_ids"][:, max(t - 1, 0)]
        kept = logits.sigmoid()[None, :, None, None] * ~begins[:, None, None, None]
        state = kept * state + k[:, t, :, :, None] * v[:, t, :, None]
        expected[:, t] = (state.mT @ q[:, t, :, :, None])[..., 0]
    found = retention.Recurrence()([q, k, v], [logits], batch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_heads_that_ranks_cannot_divide_are_refused_by_name(job_of):
    text = MODEL.replace("heads = 4", "heads = 3").replace("dim = 16", "dim = 12")
    with refuses("model.attention.heads", "3", "tensor-parallel"):
        job_of("tp", f"{text}[parallel.tp]\ndegree = 2\n", ranks=2)
