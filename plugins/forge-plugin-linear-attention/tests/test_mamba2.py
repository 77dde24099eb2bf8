"""The layer against transformers' Mamba-2, under `cp` beside softmax attention, and in generation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import FalconH1Config, GraniteMoeHybridConfig, Mamba2Config
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_linear_attention import Mamba2
from forge_plugin_parallel import ContextParallel, TensorParallel
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
MAMBA = Mamba2(heads=4, groups=2, head_dim=5, state=6, chunk=4)
HYBRID = Transformer(
    vocab_size=VOCABULARY,
    dim=24,
    layers=2,
    init_std=0.2,
    attention=AttentionPattern(
        kinds={"mamba": MAMBA, "full": GroupedQueryAttention(heads=4, kv_heads=2)}, layers=("mamba", "full")
    ),
)
LAYOUTS = {
    "ring": LayoutCase(ranks=2, parallel={"cp": {"degree": 2, "method": "ring"}}),
    "ulysses": LayoutCase(ranks=2, parallel={"cp": {"degree": 2, "method": "ulysses"}}),
    "tp2": LayoutCase(ranks=2, parallel={"tp": {"degree": 2}}),
}


def job(folder: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {"steps": 3, "precision": "fp64", "global_batch_size": 4, "seq_len": 48}
    data = {"sources": (RandomDocuments(),), "packing": Isolate()}
    return tiny_job(str(folder), installed(), **{"model": HYBRID, "data": data, **settings, **changes})


def observe(folder: Path, changes: Mapping[str, Any]) -> Curve:
    return curves.train(job(folder, **changes), installed())


def named(*names: str) -> Mapping[str, LayoutCase]:
    return {name: LAYOUTS[name] for name in names}


def observe_one_group(folder: Path, changes: Mapping[str, Any]) -> Curve:
    one = attrs.evolve(HYBRID, attention=attrs.evolve(MAMBA, groups=1))
    return curves.train(job(folder, model=one, **changes), installed())


test_packed_documents_on_ranks = layout_law(
    Case("mamba2", observe=observe, compare=same_curve, layouts=named("ring", "ulysses")),
    Case("one group", observe=observe_one_group, compare=same_curve, layouts=named("ulysses", "tp2")),
)


def refused(folder: Path, ranks: int = 1, parallel: Mapping[str, Any] | None = None, **keys: Any) -> list[Any]:
    attention = Mamba2(**{"heads": 4, **keys})
    return problems_of(job(folder, model=attrs.evolve(HYBRID, attention=attention), parallel=parallel or {}), ranks)


def test_heads_are_refused_where_they_do_not_divide(tmp_path: Path) -> None:
    where = "model.attention."
    check_problems(refused(tmp_path, groups=3), at(where + "groups", "heads = 4"))
    check_problems(refused(tmp_path, norm_groups=3), at(where + "norm_groups", "heads = 4"))
    check_problems(refused(tmp_path, norm="none", norm_groups=2), at(where + "norm_groups", "none"))
    check_problems(refused(tmp_path, heads=5), at(where + "heads", "48", "head_dim"))
    check_problems(refused(tmp_path, heads=5, head_dim=3))


def test_what_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    where, tp3, cp2 = "model.attention.", {"tp": TensorParallel(degree=3)}, {"cp": ContextParallel(degree=2)}
    check_problems(refused(tmp_path, 2, cp2, heads=3), at("parallel.cp.degree", "3 key/value heads"))
    found = refused(tmp_path, 3, tp3, heads=4)
    assert any(problem.path == where + "heads" and "3" in problem.message for problem in found), found
    found = refused(tmp_path, 3, tp3, heads=6, groups=2)
    assert any(problem.path == where + "groups" for problem in found), found
    found = refused(tmp_path, 3, tp3, heads=6, groups=1, norm_groups=2)
    assert any(problem.path == where + "norm_groups" for problem in found), found


@pytest.mark.parametrize("limits", [(0.2, 0.1), (-1.0, 0.0), (0.1, 0.1)])
def test_bounds_without_a_step_between_them_are_refused(limits: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="dt_limit"):
        Mamba2(dt_limit=limits)


DIM, HEADS, HEAD, STATE = 16, 4, 8, 6
SIZES = {"hidden_size": DIM, "num_hidden_layers": 1}
NAMES = {
    "mamba_n_heads": HEADS,
    "mamba_d_head": HEAD,
    "mamba_d_state": STATE,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
    "rms_norm_eps": 1e-4,
}
FALCON = {**SIZES, **NAMES, "mamba_d_ssm": HEADS * HEAD, "mamba_rms_norm": True}
MIXERS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "Mamba-2": (
        Mamba2Mixer,
        Mamba2Config,
        {
            **SIZES,
            "num_heads": HEADS,
            "head_dim": HEAD,
            "state_size": STATE,
            "n_groups": 2,
            "conv_kernel": 3,
            "expand": 2,
            "chunk_size": 8,
            "layer_norm_epsilon": 1e-4,
            "time_step_limit": (0.02, 0.5),
        },
        {"groups": 2, "dt_limit": (0.02, 0.5)},
    ),
    "Granite": (
        GraniteMoeHybridMambaLayer,
        GraniteMoeHybridConfig,
        {**SIZES, **NAMES, "mamba_proj_bias": True},
        {"groups": 1, "bias": True},
    ),
    "without biases": (
        GraniteMoeHybridMambaLayer,
        GraniteMoeHybridConfig,
        {**SIZES, **NAMES, "mamba_conv_bias": False, "mamba_n_groups": 4},
        {"groups": 4, "conv_bias": False},
    ),
    "norm before the gate": (
        FalconH1Mixer,
        FalconH1Config,
        {**FALCON, "mamba_norm_before_gate": True, "mamba_n_groups": 2},
        {"groups": 2, "norm": "before"},
    ),
    "without a norm": (
        FalconH1Mixer,
        FalconH1Config,
        {**FALCON, "mamba_rms_norm": False, "mamba_n_groups": 2},
        {"groups": 2, "norm": "none"},
    ),
}


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the code of transformers names float32 whatever its dtype, it gets float64."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def rows_of(fused: Tensor, name: str, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Returns the rows of a fused matrix by the names of its parts."""
    return {name.format(part): rows for part, rows in zip(sizes, fused.split([*sizes.values()]), strict=True)}


@torch.no_grad()
@pytest.mark.parametrize("name", MIXERS)
def test_it_computes_what_transformers_does(name: str, wide: None) -> None:
    their_class, config, keys, ours_keys = MIXERS[name]
    torch.manual_seed(0)
    theirs = their_class(config(**keys), 0).double().eval()
    theirs.mup_vector = 1.0  # of Falcon-H1, which its model sets
    for parameter in theirs.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.3)
    component = Mamba2(
        **{"heads": HEADS, "head_dim": HEAD, "state": STATE, "conv": 3, "norm_eps": 1e-4, "chunk": 4, **ours_keys}
    )
    ours = component.build(ON_CPU, DIM, InitStd(0.1, 0.1)).double()  # type: ignore[arg-type]
    inner, shared = HEADS * HEAD, component.groups * STATE
    parts = {"gate": inner, "x": inner, "b": shared, "c": shared, "step": HEADS}
    weights = {"log_rate.weight": theirs.A_log, "offset.weight": theirs.dt_bias, "skip.weight": theirs.D}
    weights |= rows_of(theirs.in_proj.weight, "{}.weight", parts) | {"o.weight": theirs.out_proj.weight}
    convolved = {"x": inner, "b": shared, "c": shared}
    weights |= rows_of(theirs.conv1d.weight[:, 0], "{}_conv.weight", convolved)
    if component.bias:
        weights |= rows_of(theirs.in_proj.bias, "{}.bias", parts) | {"o.bias": theirs.out_proj.bias}
    if component.conv_bias:
        weights |= rows_of(theirs.conv1d.bias, "{}_conv_bias.weight", convolved)
    if component.norm != "none":
        weights["norm.weight"] = theirs.norm.weight
    ours.load_state_dict(weights)
    x = torch.randn(2, 19, DIM, dtype=torch.float64)
    torch.testing.assert_close(ours(x, {}), theirs(x), rtol=1e-9, atol=1e-9)


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


def test_the_cache_does_not_grow_with_the_text(tmp_path: Path) -> None:
    with curves.Training.of(job(tmp_path, model=attrs.evolve(HYBRID, attention=MAMBA)), installed()) as training:
        model, sizes = training.run.model.eval(), []
        for length in (4, 40):
            cache = model.new_cache(2, length)
            model.decode({"input_ids": torch.arange(2 * length).view(2, length) % VOCABULARY}, cache)
            sizes.append(sum(part.nbytes for part in cache.values()))
    tail, state = 3 * (4 * 5 + 2 * 2 * 6), 4 * 6 * 5
    assert sizes == [2 * 2 * 8 * (tail + state)] * 2


def test_products_are_counted_as_torch_counts_them() -> None:
    """Of whole chunks, forward and backward; filters of convolutions are sums to torch, and 6 a weight here."""
    length, component = 32, Mamba2(heads=4, groups=2, head_dim=5, state=6, chunk=8, norm="none")
    layer = component.build(ON_CPU, DIM, InitStd(0.1, 0.1))  # type: ignore[arg-type]
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(1, length, DIM, requires_grad=True), {}).sum().backward()
    filters = 6 * component.conv * (4 * 5 + 2 * 2 * 6)
    assert counter.get_total_flops() == length * (layer.flops(length) - filters)
