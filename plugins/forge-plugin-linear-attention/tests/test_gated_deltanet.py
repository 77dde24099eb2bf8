"""The layer against transformers' Qwen3-Next, under `cp` beside softmax attention, and in generation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_linear_attention import GatedDeltaNet
from forge_plugin_parallel import ContextParallel
from forge_plugin_text.packing import Isolate
from forge_plugin_transformer import AttentionPattern, GroupedQueryAttention, InitStd, Transformer
from forge_testing import RandomDocuments, curves, tiny_job
from forge_testing.catalogs import installed
from forge_testing.curves import Curve, same_curve
from forge_testing.laws import Case, layout_law
from forge_testing.layouts import LayoutCase
from forge_testing.refusals import at, check_problems, problems_of

ON_CPU = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float64, path="")

VOCABULARY = 48
DELTA = GatedDeltaNet(heads=6, key_heads=3, head_dim=6, value_dim=5, chunk=4)
HYBRID = Transformer(
    vocab_size=VOCABULARY,
    dim=24,
    layers=2,
    init_std=0.2,
    attention=AttentionPattern(
        kinds={"delta": DELTA, "full": GroupedQueryAttention(heads=3, kv_heads=3)}, layers=("delta", "full")
    ),
)
CP3 = {
    method: LayoutCase(ranks=3, parallel={"cp": {"degree": 3, "method": method}}, needs="sequence_mixers")
    for method in ("ring", "all_gather", "ulysses")
}


def job(folder: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {"steps": 3, "precision": "fp64", "global_batch_size": 4, "seq_len": 48}
    data = {"sources": (RandomDocuments(),), "packing": Isolate()}
    return tiny_job(str(folder), installed(), **{"model": HYBRID, "data": data, **settings, **changes})


def observe(folder: Path, changes: Mapping[str, Any]) -> Curve:
    return curves.train(job(folder, **changes), installed())


test_documents_on_three_ranks_with_some_positions_each = layout_law(
    Case("hybrid", observe=observe, compare=same_curve, layouts=CP3)
)


@pytest.mark.parametrize("method", CP3)
def test_ranks_that_cannot_share_the_heads_are_refused(tmp_path: Path, method: str) -> None:
    stages = {"cp": ContextParallel(degree=2, method=method)}
    key = "method" if method == "ulysses" else "degree"
    check_problems(problems_of(job(tmp_path, parallel=stages), 2), at(f"parallel.cp.{key}", "3 key/value heads"))


def test_heads_are_refused_where_they_do_not_divide(tmp_path: Path) -> None:
    def refused(**keys: Any) -> list[Any]:
        return problems_of(job(tmp_path, model=attrs.evolve(HYBRID, attention=GatedDeltaNet(**keys))))

    check_problems(refused(heads=6, key_heads=4), at("model.attention.key_heads", "heads = 6"))
    check_problems(refused(heads=5), at("model.attention.heads", "24", "head_dim"))
    check_problems(refused(heads=5, head_dim=3))


def test_it_computes_what_qwen3_next_does() -> None:
    g, h, k, v, dim = 2, 4, 6, 5, 16
    config = Qwen3NextConfig(
        hidden_size=dim,
        linear_num_key_heads=g,
        linear_num_value_heads=h,
        linear_key_head_dim=k,
        linear_value_head_dim=v,
        linear_conv_kernel_dim=3,
        rms_norm_eps=1e-5,
        dtype=torch.float64,
    )
    torch.manual_seed(0)
    theirs = Qwen3NextGatedDeltaNet(config, 0).double()
    component = GatedDeltaNet(heads=h, key_heads=g, head_dim=k, value_dim=v, conv=3, norm_eps=1e-5, chunk=8)
    ours = component.build(ON_CPU, dim, InitStd(0.1, 0.1)).double()  # type: ignore[arg-type]
    # Rows of theirs stand together by heads of keys: q, k, values and gates of that head
    parts = theirs.in_proj_qkvz.weight.view(g, -1, dim).split([k, k, v * h // g, v * h // g], 1)
    small = theirs.in_proj_ba.weight.view(g, -1, dim).split([h // g, h // g], 1)
    filters = theirs.conv1d.weight[:, 0].split([g * k, g * k, h * v])
    rows = dict(zip(("q", "k", "v", "gate"), parts, strict=True)) | dict(zip(("beta", "step"), small, strict=True))
    weights = {name: tensor.reshape(-1, dim) for name, tensor in rows.items()}
    weights |= dict(zip(("q_conv", "k_conv", "v_conv"), filters, strict=True))
    weights |= {
        "log_rate": theirs.A_log,
        "offset": theirs.dt_bias,
        "norm": theirs.norm.weight,
        "o": theirs.out_proj.weight,
    }
    ours.load_state_dict({f"{name}.weight": tensor.detach() for name, tensor in weights.items()})
    x = torch.randn(2, 19, dim, dtype=torch.float64)
    # Theirs computes the state in float32
    torch.testing.assert_close(ours(x, {}), theirs(x), rtol=1e-5, atol=1e-6)


def test_generation_with_a_cache_is_the_one_without(tmp_path: Path) -> None:
    """Prompts of several lengths, in rows with padding, and rows that take the place of finished ones."""
    with curves.Training.of(job(tmp_path, model=HYBRID), installed()) as training:
        model = training.run.model.eval()
        prompts = [[5, 7, 11, 13, 17, 19, 23], [29, 31], [37, 41, 43, 3, 2]]
        found = [
            generate(model, prompts, 16, 0, Sampling(temperature=0), use_cache=cache, batch_size=2)
            for cache in (True, False)
        ]
    assert found[0] == found[1]
    assert len({tuple(row) for row in found[0]}) == 3


def test_the_cache_does_not_grow_with_the_text(tmp_path: Path) -> None:
    with curves.Training.of(job(tmp_path, model=attrs.evolve(HYBRID, attention=DELTA)), installed()) as training:
        model, sizes = training.run.model.eval(), []
        for length in (4, 40):
            cache = model.new_cache(2, length)
            model.decode({"input_ids": torch.arange(2 * length).view(2, length) % VOCABULARY}, cache)
            sizes.append(sum(part.nbytes for part in cache.values()))
    tail, state = 3 * (3 * 6 * 2 + 6 * 5), 6 * 6 * 5
    assert sizes == [2 * 2 * 8 * (tail + state)] * 2
