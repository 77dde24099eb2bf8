"""`kda` against Kimi Linear's layer, under every layout and beside softmax attention, and in generation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from transformers import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_linear_attention import KDA
from forge_plugin_parallel import ContextParallel
from forge_plugin_text.packing import Isolate
from forge_plugin_transformer import AttentionPattern, GroupedQueryAttention, InitStd, Transformer
from forge_testing import RandomDocuments, curves, tiny_job
from forge_testing.catalogs import installed
from forge_testing.curves import Curve, same_curve
from forge_testing.laws import Case, layout_law
from forge_testing.layouts import LayoutCase
from forge_testing.refusals import at, check_problems, problems_of
from forge_testing.suites import ModelSuite

ON_CPU = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float64, path="")

VOCABULARY = 48
LAYER = KDA(heads=4, head_dim=6, value_dim=5, rank=3, chunk=16)
HYBRID = Transformer(
    vocab_size=VOCABULARY,
    dim=24,
    layers=2,
    init_std=0.2,
    attention=AttentionPattern(
        kinds={"kda": LAYER, "full": GroupedQueryAttention(heads=4, kv_heads=4)}, layers=("kda", "full")
    ),
)
CP2 = {
    method: LayoutCase(ranks=2, parallel={"cp": {"degree": 2, "method": method}}, needs="sequence_mixers")
    for method in ("ring", "ulysses")
}


class TestKDA(ModelSuite):
    component = Transformer(vocab_size=32, dim=16, layers=2, attention=KDA(heads=4, value_dim=3, chunk=4))
    layouts = ("tp2_whole_sequences", "checkpointing2")  # cp2, with documents: below


def job(folder: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {"steps": 3, "precision": "fp64", "global_batch_size": 4, "seq_len": 48}
    data = {"sources": (RandomDocuments(),), "packing": Isolate()}
    return tiny_job(str(folder), installed(), **{"model": HYBRID, "data": data, **settings, **changes})


def observe(folder: Path, changes: Mapping[str, Any]) -> Curve:
    return curves.train(job(folder, **changes), installed())


test_documents_on_ranks_with_some_positions_each = layout_law(
    Case("kda", observe=observe, compare=same_curve, layouts=CP2)
)


def test_heads_are_refused_where_they_do_not_divide(tmp_path: Path) -> None:
    def refused(parallel: Any = None, ranks: int = 1, **keys: Any) -> list[Any]:
        model = attrs.evolve(HYBRID, attention=KDA(**keys))
        return problems_of(job(tmp_path, model=model, **({"parallel": parallel} if parallel else {})), ranks)

    check_problems(refused(heads=5), at("model.attention.heads", "24", "head_dim"))
    check_problems(refused(heads=5, head_dim=3))
    cp = {"cp": ContextParallel(degree=2)}
    check_problems(refused(cp, 2, heads=3), at("parallel.cp.degree", "3 key/value heads"))


def test_it_computes_what_kimi_linear_does(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, width, dim = 3, 8, 20
    config = KimiLinearConfig(
        hidden_size=dim,
        linear_num_heads=heads,
        linear_head_dim=width,
        linear_conv_kernel_dim=3,
        rms_norm_eps=1e-5,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    # Theirs computes the state, the norm and the decay in float32 by name
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.manual_seed(0)
    theirs = KimiLinearDeltaAttention(config, 0).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.5)
    component = KDA(heads=heads, head_dim=width, conv=3, norm_eps=1e-5, chunk=32)
    ours = component.build(ON_CPU, dim, InitStd(0.1, 0.1)).double()  # type: ignore[arg-type]
    gate = theirs.forget_gate
    weights = {
        **{name: getattr(theirs, f"{name}_proj").weight for name in "qkvo"},
        **dict(zip(("q_conv", "k_conv", "v_conv"), theirs.conv1d.weight[:, 0].chunk(3), strict=True)),
        "step_down": gate.f_a_proj.weight,
        "step_up": gate.f_b_proj.weight,
        "offset": gate.dt_bias,
        "log_rate": gate.A_log.view(-1),
        "gate_down": theirs.g_a_proj.weight,
        "gate_up": theirs.g_b_proj.weight,
        "beta": theirs.b_proj.weight,
        "norm": theirs.o_norm.weight,
    }
    ours.load_state_dict({f"{name}.weight": tensor.detach() for name, tensor in weights.items()})
    x = torch.randn(2, 75, dim, dtype=torch.float64)
    torch.testing.assert_close(ours(x, {}), theirs(x), rtol=1e-9, atol=1e-11)


def test_generation_with_a_cache_is_the_one_without(tmp_path: Path) -> None:
    """Prompts of several lengths, in rows with padding, and rows that take the place of finished ones."""
    with curves.Training.of(job(tmp_path), installed()) as training:
        model = training.run.model.eval()
        prompts = [[5, 7, 11, 13, 17, 19, 23], [29, 31], [37, 41, 43, 3, 2]]
        found = [
            generate(model, prompts, 16, 0, Sampling(temperature=0), use_cache=cache, batch_size=2)
            for cache in (True, False)
        ]
    assert found[0] == found[1]
    assert len({tuple(row) for row in found[0]}) == 3
