"""Packings that keep documents apart refuse a model in which they see each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor

from forge_core.contracts.contexts import BuildContext
from forge_plugin_text.packing import BestFit, Isolate
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import job_problems, tiny_job
from forge_testing.documents import RandomDocuments


@frozen(kw_only=True)
class WithShift(Transformer):
    """Its first layer adds the position before to each, or, if it `stays`, that of the same document."""

    stays: bool = False

    def build(self, context: BuildContext) -> Any:
        model: Any = super().build(context)
        after = model.layers["0"].forward
        model.layers["0"].forward = lambda carry, batch: after((self._shifted(carry[0], batch),), batch)
        return model

    def _shifted(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        earlier = x.roll(1, 1)
        if self.stays and "document_ids" in batch:
            ids = batch["document_ids"]
            same = torch.nn.functional.pad(ids[:, 1:] == ids[:, :-1], (1, 0))
            earlier = earlier * same.unsqueeze(-1)
        return x + earlier


@pytest.mark.parametrize("packing", [Isolate(), BestFit()])
@pytest.mark.parametrize("stays", [True, False])
def test_a_shift_over_the_border_of_documents_is_refused_by_name(tmp_path: Path, packing: Any, stays: bool) -> None:
    attention = GroupedQueryAttention(heads=2, kv_heads=2)
    model = WithShift(vocab_size=32, dim=16, layers=2, attention=attention, stays=stays)
    data = {"sources": (RandomDocuments(longest=60, count=12),), "packing": packing}
    problems = job_problems(tiny_job(str(tmp_path), model=model, data=data, seq_len=24), 1)
    expected = "data.packing: documents of a sequence change each other in layers.0 of TransformerModel"
    assert [problem.partition(";")[0] for problem in problems] == ([] if stays else [expected])
