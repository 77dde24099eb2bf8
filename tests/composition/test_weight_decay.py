"""No parameter of fewer than two dimensions has weight decay, in any model that first-party components make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from forge_core.contracts.components import Component
from forge_core.contracts.optimizer import NamedParameters
from forge_core.engine.build import build_bare_model, build_context
from forge_core.plugins.catalog import Catalog
from forge_plugin_adamw import AdamW
from forge_plugin_cross_attention import CrossAttention
from forge_plugin_linear_attention import KDA, GatedDeltaNet, Mamba2, ShortConv
from forge_plugin_lion import Lion
from forge_plugin_lowbit import AdamW8bit, AdamWBF16
from forge_plugin_mla import DeepSeekSparseAttention, MultiHeadLatentAttention
from forge_plugin_moe import ExpertChoice, Hash, MoE, SigmoidTopK, SoftmaxTopK
from forge_plugin_moma import MoMa
from forge_plugin_mot import MixtureOfTransformers
from forge_plugin_muon import Muon
from forge_plugin_schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
from forge_plugin_soap import SOAP
from forge_plugin_transformer import (
    GEGLU,
    GELU,
    XIELU,
    Add,
    AttentionPattern,
    Canon,
    FFNPattern,
    GroupedQueryAttention,
    HyperConnections,
    LayerNorm,
    ManifoldHyperConnections,
    MultiTokenPrediction,
    NoAttention,
    NoFFN,
    ParallelAttention,
    RMSNorm,
    SquaredReLU,
    SwiGLU,
    Transformer,
)
from forge_plugin_vision import (
    AnyResolution,
    AttentionPool,
    AveragePool,
    GemmaViT,
    Joint,
    LinearAdapter,
    Merger,
    MLPAdapter,
    Perceiver,
    PixelShuffle,
    QwenViT,
    ScaledPool,
    TiledViT,
    VisionLanguage,
    VisionTower,
    ViT,
)
from forge_plugin_vision.vision import TowerPart, VisionPart
from forge_testing import tiny_job
from forge_testing.catalogs import load_target

KINDS = ("model", "attention", "ffn", "router", "norm", "residual", "fusion", "vision_encoder", "adapter")
"""Kinds whose components have parameters."""
FIRST_PARTY = ("forge-run", "forge-kit", "forge-plugin-")
BIASED = GroupedQueryAttention(heads=4, kv_heads=2, bias=True, qk_norm=True, sinks=True)
LATENT = MultiHeadLatentAttention(heads=2, q_lora_rank=8)


def language(**keys: Any) -> Transformer:
    return Transformer(**{"vocab_size": 32, "dim": 16, "layers": 2, "attention": BIASED, **keys})


def routed(router: Any) -> Transformer:
    return language(ffn=MoE(experts=4, hidden=8, bias=True, shared_experts=1, shared_gate=True, router=router))


def looking(encoder: Any = None, adapter: Any = None, fusion: Any = None, model: Any = None) -> VisionLanguage:
    plain = ViT(dim=16, layers=1, heads=2, patch=2, size=(4, 4), class_token=True, pre_norm=True, qk_norm=True)
    vision = VisionPart(encoder=encoder or plain, adapter=adapter or MLPAdapter(hidden=8), images_per_sequence=2)
    return VisionLanguage(language=model or language(), vision=vision, fusion=fusion or Joint())


QWEN = QwenViT(dim=16, layers=1, heads=2, hidden=24, patch=2, table=3, patch_bias=True)
GEMMA = GemmaViT(dim=16, layers=1, heads=2, head_dim=8, hidden=8, patch=2, positions=32)
TILED = TiledViT(
    dim=16,
    layers=2,
    global_layers=1,
    heads=2,
    hidden=8,
    patch=2,
    tile=4,
    arrangements=((1, 1), (1, 2)),
    intermediate=(0,),
)
MODELS = {
    "tied": language(tie_embeddings=True, learned_positions=8, norm=RMSNorm()),
    "sparse attention": language(attention=DeepSeekSparseAttention(heads=2, index_n_heads=2)),
    "linear attention": language(attention=GatedDeltaNet(heads=4)),
    "state space": language(attention=Mamba2(heads=4, state=4)),
    "a decay for each feature": language(attention=KDA(heads=4)),
    "short convolution": language(attention=ShortConv()),
    "canon": language(canon=Canon(kernel=3)),
    "plain residual": language(residual_connection=Add()),
    "hyper-connections": language(residual_connection=HyperConnections()),
    "mHC": language(residual_connection=ManifoldHyperConnections()),
    "layer norms": language(attention=GroupedQueryAttention(heads=4, qk_norm="layer"), norm=LayerNorm(), ffn=GELU()),
    "learned slopes": language(ffn=XIELU()),
    "squared relu": language(norm=LayerNorm(offset=1), ffn=SquaredReLU(bias=True)),
    "layers of one part": language(
        attention=AttentionPattern(layers=("a", "none"), kinds={"a": BIASED, "none": NoAttention()}),
        ffn=FFNPattern(layers=("none", "b"), kinds={"b": MoE(activation="relu2", shared_experts=1), "none": NoFFN()}),
    ),
    "side by side": language(
        attention=ParallelAttention(mixers={"a": BIASED, "b": Mamba2(heads=4, state=4)}), ffn=SwiGLU(scale=0.5)
    ),
    "pattern": language(attention=AttentionPattern(layers=("a", "b"), kinds={"a": BIASED, "b": LATENT}), ffn=GEGLU()),
    "multi-token prediction": language(mtp=MultiTokenPrediction(depth=2), ffn=SwiGLU()),
    "softmax_topk": routed(SoftmaxTopK(bias=True)),
    "sigmoid_topk": routed(SigmoidTopK()),
    "hash": routed(Hash()),
    "expert_choice": routed(ExpertChoice()),
    "joint": looking(),
    "qwen_vit": looking(QWEN, Merger()),
    "gemma_vit": looking(GEMMA, ScaledPool(standardise=True)),
    "tiled_vit": looking(TILED, LinearAdapter(), CrossAttention(every=1, heads=4, kv_heads=2, qk_norm=True)),
    "mot": looking(fusion=MixtureOfTransformers()),
    "moma": looking(model=routed(MoMa(experts={"text": 2, "image": 2}, top_k=1))),
    "tower": VisionTower(vision=TowerPart(encoder=QWEN)),
    **{
        type(adapter).__name__: looking(adapter=adapter)
        for adapter in (
            PixelShuffle(bias=True),
            AveragePool(),
            AttentionPool(heads=2),
            Perceiver(latents=4, layers=1, heads=2, head_dim=8),
            AnyResolution(),
        )
    },
}
ADAM = {"adam_weight_decay": 0.5}
SPARING = [kind(weight_decay=0.5) for kind in (AdamW, Lion, ScheduleFreeAdamW, ScheduleFreeSGD, AdamW8bit, AdamWBF16)]
OPTIMIZERS = [*SPARING, Muon(weight_decay=0.5, **ADAM), SOAP(weight_decay=0.5, **ADAM)]


def components(value: Any) -> Iterator[Component]:
    """Yields the component and those in its fields."""
    if isinstance(value, Component):
        yield value
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if attrs.has(type(value)):
        value = tuple(getattr(value, field.name) for field in attrs.fields(type(value)))
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from components(item)


def test_every_component_that_has_parameters_is_in_a_model() -> None:
    catalog = Catalog.installed()
    offers = [o for o in catalog.offers() if o.kind in KINDS and o.distribution.name.startswith(FIRST_PARTY)]
    tried = {type(part) for model in MODELS.values() for part in components(model)}
    assert [offer.qualified for offer in offers if load_target(offer, catalog) not in tried] == []


@pytest.mark.parametrize("name", MODELS)
def test_vectors_have_no_weight_decay(name: str, tmp_path: Path) -> None:
    job = tiny_job(str(tmp_path), Catalog.installed(), model=MODELS[name])
    context = build_context(job, Catalog.installed(), None)
    model = build_bare_model(job, context)[0]
    parameters = NamedParameters.of(model)
    vectors = {item.name for item in parameters if item.parameter.ndim < 2}
    assert vectors
    for component in OPTIMIZERS:
        groups = component.build(context, parameters).param_groups
        decayed = {name for group in groups if group["weight_decay"] for name in group["names"]}
        assert decayed
        assert not vectors & decayed, type(component).__name__
