"""Decoding with a cache computes what the whole sequence has, by the same routing."""

from __future__ import annotations

import pytest
import torch
from moma_marked import Marked

from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_moe import MoE
from forge_plugin_moma import MoMa
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing.runs import tiny_run

GROUPS = {"text": 3, "image": 2}
LENGTH = 14
IDS = torch.tensor([[1, 2, -1, -1, -1, 3, 4, 5, -1, -1, 6, 7, 8, 9], [9, 8, 7, 6, 5, -1, -1, -1, -1, 4, 3, 2, 1, 0]])


@pytest.fixture(params=["tokens", "experts"])
def model(request, tmp_path):
    ffn = MoE(experts=5, hidden=16, router=MoMa(experts=GROUPS, choose=request.param))
    language = Transformer(dim=16, layers=2, vocab_size=32, attention=GroupedQueryAttention(heads=2), ffn=ffn)
    model = tiny_run(tmp_path, model=Marked(language=language), seq_len=LENGTH, precision="fp64").model
    for number, parameter in enumerate(model.parameters()):
        draws = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        parameter.data = draws * (0.5 if parameter.ndim > 1 else 1)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("chunks", [[LENGTH], [1] * LENGTH, [6, 1, 1, 6]], ids=["at once", "one by one", "mixed"])
def test_decoding_equals_the_whole_sequence(model, chunks):
    cache, positions = model.new_cache(2, LENGTH), torch.arange(LENGTH).expand(2, -1)
    parts = zip(IDS.split(chunks, 1), positions.split(chunks, 1), strict=True)
    hidden = torch.cat([model.decode({"input_ids": ids, "positions": p}, cache) for ids, p in parts], 1)
    torch.testing.assert_close(hidden, model({"input_ids": IDS}), rtol=1e-12, atol=1e-12)


def test_later_positions_change_nothing_in_evaluation(model):
    before, changed = model({"input_ids": IDS}), IDS.clone()
    changed[:, 9:] = 31
    after = model({"input_ids": changed})
    torch.testing.assert_close(after[:, :9], before[:, :9], rtol=1e-12, atol=1e-12)
    assert (after[:, 9:] - before[:, 9:]).abs().min(-1).values.max() > 1e-3


def test_generation_has_the_same_tokens_with_and_without_the_cache(model):
    prompts = [[1, 2, -1, -1, 3], [4, 5]]
    rows = [
        generate(model, prompts, 8, end_of_text=31, sampling=Sampling(temperature=0), use_cache=cached)
        for cached in (True, False)
    ]
    assert rows[0] == rows[1]
    assert all(rows[0])
