"""`short_conv` against LFM2's layer and a sum by hand; documents on ranks with some positions each; generation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_linear_attention import ShortConv
from forge_plugin_linear_attention.modules.short_convolution import ShortConvolution
from forge_plugin_parallel import ContextParallel, TensorParallel
from forge_plugin_text.packing import Isolate
from forge_plugin_transformer import AttentionPattern, GroupedQueryAttention, InitStd, Transformer
from forge_testing import RandomDocuments, curves, tiny_job
from forge_testing.catalogs import installed
from forge_testing.curves import Curve, same_curve
from forge_testing.laws import Case, layout_law
from forge_testing.layouts import LayoutCase
from forge_testing.refusals import at, check_problems, problems_of
from forge_testing.suites import ModelSuite

VOCABULARY = 48
HYBRID = Transformer(
    vocab_size=VOCABULARY,
    dim=24,
    layers=2,
    init_std=0.3,
    attention=AttentionPattern(
        kinds={"conv": ShortConv(conv=4), "full": GroupedQueryAttention(heads=2, kv_heads=2)}, layers=("conv", "full")
    ),
)
CP2 = {
    method: LayoutCase(ranks=2, parallel={"cp": {"degree": 2, "method": method}}, needs="sequence_mixers")
    for method in ("ring", "ulysses")
}


def job(folder: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {"steps": 3, "precision": "fp64", "global_batch_size": 4, "seq_len": 48}
    data = {"sources": (RandomDocuments(),), "packing": Isolate()}
    return tiny_job(str(folder), installed(), **{"model": HYBRID, "data": data, **settings, **changes})


class TestShortConv(ModelSuite):
    component = Transformer(vocab_size=32, dim=16, layers=2, attention=ShortConv())
    layouts = ("tp2_whole_sequences", "checkpointing2")  # cp2, with documents: below


def observe(folder: Path, changes: Mapping[str, Any]) -> Curve:
    return curves.train(job(folder, **changes), installed())


test_documents_on_ranks_with_some_positions_each = layout_law(
    Case("short_conv", observe=observe, compare=same_curve, layouts=CP2)
)


def layer(dim: int = 8, conv: int = 3) -> ShortConvolution:
    """A layer in float64 with random weights."""
    torch.manual_seed(0)
    made: Any = ShortConv(conv=conv).build(None, dim, InitStd(0.1, 0.1))  # type: ignore[arg-type]
    made.double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made  # type: ignore[no-any-return]


def test_it_computes_what_lfm2_does() -> None:
    ours = layer(dim=8, conv=3)
    config = Lfm2Config(hidden_size=8, num_hidden_layers=1, layer_types=["conv"], conv_L_cache=3)
    theirs = Lfm2ShortConv(config, 0).double()
    weights = {
        "in_proj.weight": torch.cat([ours.b.weight, ours.c.weight, ours.v.weight]),
        "conv.weight": ours.filters.weight[:, None],
        "out_proj.weight": ours.o.weight,
    }
    theirs.load_state_dict(weights)
    x = torch.randn(2, 19, 8, dtype=torch.float64)
    torch.testing.assert_close(ours(x, {}), theirs(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("conv", [1, 2, 5, 9])
def test_documents_are_convolved_by_themselves(conv: int) -> None:
    """Shorter than the convolution, and longer; an id that occurs again later is another document."""
    made, lengths = layer(conv=conv), (3, 1, 2, 7)
    x = torch.randn(2, 13, 8, dtype=torch.float64)
    ids = torch.tensor([5, 6, 5, 8]).repeat_interleave(torch.tensor(lengths)).expand(2, -1)
    alone = torch.cat([made(part, {}) for part in x.split(lengths, 1)], 1)
    torch.testing.assert_close(made(x, {"document_ids": ids}), alone, rtol=1e-12, atol=1e-12)
    assert torch.allclose(made(x, {}), alone) == (conv == 1)


def test_ranks_that_cannot_share_the_features_are_refused(tmp_path: Path) -> None:
    alone = attrs.evolve(HYBRID, dim=22, attention=ShortConv())
    cp = problems_of(job(tmp_path, model=alone, parallel={"cp": ContextParallel(degree=4)}), 4)
    check_problems(cp, at("parallel.cp.degree", "22", "4 ranks"))
    tp = problems_of(job(tmp_path, model=alone, parallel={"tp": TensorParallel(degree=4)}), 4)
    assert any("22" in problem.message and problem.path.startswith("parallel.tp") for problem in tp)


def test_generation_with_a_cache_is_the_one_without(tmp_path: Path) -> None:
    """Prompts shorter and longer than the convolution, and rows that take the place of finished ones."""
    with curves.Training.of(job(tmp_path), installed()) as training:
        model = training.run.model.eval()
        prompts = [[5, 7, 11, 13, 17, 19, 23], [29], [37, 41, 43, 3, 2]]
        found = [
            generate(model, prompts, 16, 0, Sampling(temperature=0), use_cache=cache, batch_size=2)
            for cache in (True, False)
        ]
    assert found[0] == found[1]
    assert len({tuple(row) for row in found[0]}) == 3


def test_the_cache_is_the_last_inputs_of_the_convolution(tmp_path: Path) -> None:
    model = attrs.evolve(HYBRID, attention=ShortConv(conv=4))
    with curves.Training.of(job(tmp_path, model=model), installed()) as training:
        made, sizes = training.run.model.eval(), []
        for length in (2, 40):
            cache = made.new_cache(2, length)
            made.decode({"input_ids": torch.arange(2 * length).view(2, length) % VOCABULARY}, cache)
            made.decode({"input_ids": torch.ones(2, 1, dtype=torch.int64)}, cache)
            sizes.append(sum(part.nbytes for part in cache.values()))
    assert sizes == [2 * 2 * 8 * (3 + 1) * 24] * 2
