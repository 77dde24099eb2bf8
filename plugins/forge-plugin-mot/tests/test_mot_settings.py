"""Models that the fusion cannot untie are refused by name when the job is checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from attrs import frozen

from forge_core.contracts.components import ModelComponent
from forge_core.contracts.errors import Problem
from forge_plugin_mla import MultiHeadLatentAttention
from forge_plugin_moe import MoE
from forge_plugin_mot import MixtureOfTransformers
from forge_plugin_transformer import (
    GELU,
    Canon,
    FFNPattern,
    GroupedQueryAttention,
    LayerNorm,
    MultiTokenPrediction,
    NoFFN,
    SwiGLU,
    Transformer,
)
from forge_testing import TinyModel
from forge_testing.refusals import at, check_problems, problems_of, refuses, refuses_all

MLA = MultiHeadLatentAttention(heads=4, kv_lora_rank=6, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
ALL_HEADS = GroupedQueryAttention(heads=4, kv_heads=2, qk_norm="all")
AFTER = MixtureOfTransformers(norm="after")
EXPERTS = MoE(experts=2, hidden=8)
UNFIT = {
    "mtp": (
        MixtureOfTransformers(),
        {"mtp": MultiTokenPrediction()},
        at("model.fusion", "model.language.mtp"),
    ),
    "canon": (MixtureOfTransformers(), {"canon": Canon()}, at("model.fusion", "model.language.canon")),
    "mla": (MixtureOfTransformers(), {"attention": MLA}, at("model.fusion.untie", "MultiHeadLatentAttention")),
    "moe": (MixtureOfTransformers(), {"ffn": EXPERTS}, at("model.fusion.untie", "router", "MoE")),
    "some moe": (
        MixtureOfTransformers(),
        {"ffn": FFNPattern(layers=("a", "b"), kinds={"a": SwiGLU(), "b": EXPERTS})},
        at("model.fusion.untie", "router", "MoE"),
    ),
    "one part": (
        MixtureOfTransformers(),
        {"ffn": FFNPattern(layers=("a", "b"), kinds={"a": SwiGLU(), "b": NoFFN()})},
        at("model.fusion", "layer 1", "ffn", "joint"),
    ),
    "norms": (AFTER, {"norm_placement": "both"}, at("model.fusion.norm", '"after"', 'norm = "before"')),
    "shared norm": (
        AFTER,
        {"norm_placement": "shared", "residual": "parallel"},
        at("model.fusion.norm", '"after"', 'norm = "before"', "one norm for both"),
    ),
    "twice": (MixtureOfTransformers(untie=("ffn", "ffn")), {}, at("model.fusion.untie", "['ffn', 'ffn']")),
}


@pytest.fixture
def problems(tiny_rows: Callable[..., Any]) -> Callable[..., list[Problem]]:
    return lambda fusion, language: problems_of(tiny_rows(fusion, language=language))


@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_be_untied_is_refused(name: str, language: Any, problems: Callable[..., list[Problem]]) -> None:
    fusion, changes, expected = UNFIT[name]
    check_problems(problems(fusion, attrs.evolve(language, **changes)), expected)


@frozen(kw_only=True)
class Wrapped(ModelComponent):
    """A component that does not show which language model it builds."""

    inner: ModelComponent

    def build(self, context: Any) -> Any:
        return context.build(self.inner)


@frozen(kw_only=True)
class Normless(Wrapped):
    """It leaves out the norm behind the layers."""

    def build(self, context: Any) -> Any:
        model = context.build(self.inner)
        model.norm = None
        return model


UNFIT_WHEN_BUILT = {
    "no norm": (Normless(inner=Transformer(vocab_size=32, dim=16)), at("model.fusion.untie", "norm")),
    "layers": (TinyModel(), at("model.fusion", "layers.0", "Layer")),
    "mtp": (Transformer(vocab_size=32, dim=16, mtp=MultiTokenPrediction()), at("model.fusion", "model.language.mtp")),
    "canon": (Transformer(vocab_size=32, dim=16, canon=Canon()), at("model.fusion", "model.language.canon")),
    "mla": (Transformer(vocab_size=32, dim=16, attention=MLA), at("model.fusion.untie", "LatentAttention")),
    "moe": (Transformer(vocab_size=32, dim=16, ffn=EXPERTS), at("model.fusion.untie", "router", "MoELayer")),
}


def test_norms_that_a_component_of_ones_own_has_after_parts_are_not_moved(bare: Callable[..., Any]) -> None:
    language = Transformer(vocab_size=32, dim=16, norm_placement="post")
    with refuses("model.fusion.norm", '"after"', 'norm = "before"'):
        bare(AFTER, Wrapped(inner=language))


@pytest.mark.parametrize("name", UNFIT_WHEN_BUILT)
def test_what_a_component_of_ones_own_builds_is_refused(name: str, bare: Callable[..., Any]) -> None:
    language, expected = UNFIT_WHEN_BUILT[name]
    with refuses_all(expected):
        bare(MixtureOfTransformers(), Wrapped(inner=language))


def test_a_model_of_another_kind_cannot_have_it(make_job: Callable[..., Any], build: Callable[..., Any]) -> None:
    alone = build(make_job(model=Transformer(vocab_size=32, dim=16)))
    with refuses("model", "vision_language", "Transformer"):
        MixtureOfTransformers().build(alone.context, model=alone.model, vision=None)


FIT = {
    "blocks": (MixtureOfTransformers(), {"attention": ALL_HEADS, "norm_placement": "both", "residual": "parallel"}),
    "shared norm": (MixtureOfTransformers(), {"norm_placement": "shared", "residual": "parallel", "head_bias": True}),
    "mla": (MixtureOfTransformers(untie=("ffn", "norm")), {"attention": MLA}),
    "moe": (MixtureOfTransformers(untie=("attention", "norm")), {"ffn": EXPERTS}),
    "others": (MixtureOfTransformers(), {"ffn": GELU(bias=True), "norm": LayerNorm(), "tie_embeddings": True}),
}


@pytest.mark.parametrize("name", FIT)
def test_what_is_shared_may_be_anything(name: str, bare: Callable[..., Any], language: Any, batch: Any) -> None:
    fusion, changes = FIT[name]
    model = bare(fusion, attrs.evolve(language, **changes))
    model(batch).sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "modalities" in name)


def test_norms_of_each_modality_stand_where_the_language_model_has_them(
    make_model: Callable[..., Any], language: Any, batch: Any
) -> None:
    language = attrs.evolve(language, residual="parallel", residual_scale=0.5)
    moved = make_model(AFTER, language)
    own = make_model(language=attrs.evolve(language, norm_placement="post"))
    state = {
        re.sub(r"^(layers\.\d+\.(attention|ffn))_norm", r"\1_post_norm", name): tensor
        for name, tensor in moved.state_dict().items()
    }
    assert own.state_dict().keys() == state.keys()
    own.load_state_dict(state)
    assert torch.equal(own(batch), moved(batch))
