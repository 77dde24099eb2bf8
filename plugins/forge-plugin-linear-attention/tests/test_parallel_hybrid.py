"""Attention and Mamba-2 side by side in each layer, as in Falcon-H1: the type `parallel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve

from forge_core.contracts.components import ModelComponent
from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import parse_component
from forge_plugin_linear_attention import Mamba2
from forge_plugin_transformer import (
    AttentionPattern,
    GroupedQueryAttention,
    NoAttention,
    ParallelAttention,
    SwiGLU,
    Transformer,
)
from forge_testing.refusals import at, check_problems, naming, problems_of
from forge_testing.suites import ModelSuite

FULL = GroupedQueryAttention(heads=4, kv_heads=2)
MAMBA = Mamba2(heads=4, head_dim=5, state=3, groups=2, norm="none", chunk=4, multipliers=(0.5, 1.5, 2.0, 0.7, 1.2))
BOTH = ParallelAttention(
    mixers={"full": FULL, "mamba": MAMBA},
    scales={"full": 0.9, "mamba": 0.3},
    input_scales={"mamba": 1.25},
)
MODEL = Transformer(vocab_size=32, dim=16, layers=2, attention=BOTH, ffn=SwiGLU(hidden=24, gate_scale=0.8, scale=0.6))


class TestParallelHybrid(ModelSuite):
    component = MODEL
    layouts = ("tp2", "cp2")


class TestParallelHybridInSomeLayers(ModelSuite):
    """With windows of two mixers, whose points have two names."""

    component = evolve(
        MODEL,
        attention=AttentionPattern(
            layers=("both", "windows"),
            kinds={
                "both": BOTH,
                "windows": ParallelAttention(mixers={"near": evolve(FULL, window=3), "far": evolve(FULL, window=9)}),
            },
        ),
    )
    layouts = ()


@pytest.fixture
def make(tmp_path: Any) -> Callable[..., Any]:
    from forge_testing.runs import tiny_run

    return lambda **keys: tiny_run(tmp_path, model=evolve(MODEL, **keys), precision="fp64").model


def test_outputs_are_added_with_their_factors(make: Callable[..., Any]) -> None:
    attention = make().layers["0"].attention
    x = torch.randn(2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    alone = dict(attention.mixers.items())
    expected = 0.9 * alone["full"](x, {}) + 0.3 * alone["mamba"](1.25 * x, {})
    assert (attention(x, {}) - expected).abs().max() < 1e-15
    assert expected.abs().max() > 1e-4


def test_factors_are_those_of_scaled_weights(make: Callable[..., Any]) -> None:
    """Folded into weights, all factors but those of the input of both change nothing."""
    scaled, plain = (
        make(),
        make(
            ffn=SwiGLU(hidden=24),
            attention=ParallelAttention(mixers={"full": FULL, "mamba": evolve(MAMBA, multipliers=(1.0,) * 5)}),
        ),
    )
    plain.load_state_dict(scaled.state_dict())
    with torch.no_grad():
        for layer in plain.layers.values():
            layer.ffn.gate.weight *= 0.8
            layer.ffn.down.weight *= 0.6
            layer.attention.mixers["full"].o.weight *= 0.9
            mamba = layer.attention.mixers["mamba"]
            mamba.o.weight *= 0.3
            for name, factor in zip(("gate", "x", "b", "c", "step"), MAMBA.multipliers, strict=True):
                mamba.get_submodule(name).weight *= factor * 1.25
    batch = {"input_ids": torch.arange(12).view(2, 6)}
    assert (plain(batch) - scaled(batch)).abs().max() < 1e-12


def test_points_of_one_name_have_the_mixers_name(make: Callable[..., Any]) -> None:
    points = make(attention=ParallelAttention(mixers={"near": evolve(FULL, window=3), "mamba": MAMBA})).tap_points()
    assert points["layers.1.z"].module == "layers.1.attention.mixers.near.mixed"
    windows = ParallelAttention(mixers={"near": evolve(FULL, window=3), "far": FULL})
    points = make(attention=windows).tap_points()
    assert "layers.0.z" not in points
    assert points["layers.0.far_z"].module == "layers.0.attention.mixers.far.mixed"


def test_what_does_not_go_together_is_refused(tmp_path: Any) -> None:
    def problems(attention: Any) -> Any:
        from forge_testing import tiny_job

        return problems_of(tiny_job(str(tmp_path), Catalog.installed(), model=evolve(MODEL, attention=attention)))

    check_problems(
        problems(evolve(BOTH, scales={"ful": 0.5})),
        at("model.attention.scales.ful", "mixers.ful", "'full'"),
    )
    check_problems(
        problems(evolve(BOTH, mixers={"full": FULL, "mamba": NoAttention()})),
        at("model.attention.mixers.mamba", "layer 0"),
    )
    check_problems(
        problems(evolve(BOTH, mixers={"full": GroupedQueryAttention(heads=3), "mamba": MAMBA})),
        at("model.attention.mixers.full.heads", 3, 16),
    )


@pytest.mark.parametrize("keys", [{"scales": {"full": 0.0}}, {"mixers": {"full": {"type": "gqa"}}}])
def test_a_factor_is_positive_and_there_are_two_mixers(keys: dict[str, Any]) -> None:
    table = {"type": "parallel", "mixers": {"full": {"type": "gqa"}, "mamba": {"type": "mamba2"}}, **keys}
    with pytest.raises(JobError, match=naming(f"attention.{next(iter(keys))}")):
        parse_component({"type": "transformer", "attention": table}, "job.toml", ModelComponent, Catalog.installed())
