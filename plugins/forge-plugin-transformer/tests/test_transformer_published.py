"""Logits equal those of published architectures with the same weights, in float64 and in float32.

Norms and biases are random. In float64, the float32 of the references' norms and encodings is lifted, so that no
difference hides behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve
from torch import Tensor

from forge_plugin_transformer import (
    GEGLU,
    GELU,
    AttentionPattern,
    GroupedQueryAttention,
    LayerNorm,
    LinearRope,
    NoRope,
    PlainRope,
    RMSNorm,
    SwiGLU,
)

HEADS, KV_HEADS, WIDTH, DIM, LAYERS, VOCABULARY = 4, 2, 12, 48, 3, 101
SIZES = {
    "hidden_size": DIM,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "use_cache": False,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
EPS = 1e-5
WINDOW, PRE_ATTENTION, SCORE_CAP = 9, 20, 1.5
MIXED = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": WINDOW}

Reference = tuple[Any, dict[str, Any], Callable[[Mapping[str, Tensor]], dict[str, Tensor]]]
"""The reference, the keys of our model, and a function from its state to ours."""

PROJECTIONS = {f"attention.{name}": f"self_attn.{name}_proj" for name in "qkvo"}
GATED = {f"ffn.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
QK_NORMS = {f"attention.{name}_norm": f"self_attn.{name}_norm" for name in "qk"}
ENDS = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def renamed(
    state: Mapping[str, Tensor], parts: Mapping[str, str], layers: str = "model.layers", ends: Mapping[str, str] = ENDS
) -> dict[str, Tensor]:
    """The reference's tensors by our names."""
    names = {f"{theirs}.": f"{ours}." for ours, theirs in ends.items()}
    names |= {f"{layers}.{n}.{theirs}.": f"layers.{n}.{ours}." for n in range(LAYERS) for ours, theirs in parts.items()}
    triples = [(*name.rpartition("."), tensor) for name, tensor in state.items()]
    return {names[module + dot] + key: tensor for module, dot, key, tensor in triples}


def windows(attention: GroupedQueryAttention, **full: Any) -> AttentionPattern:
    """The attention of `MIXED`; `full`: keys of the layers without a window that differ."""
    kinds = {"near": evolve(attention, window=WINDOW), "full": evolve(attention, **full)}
    return AttentionPattern(layers=("near", "near", "full"), kinds=kinds)


OLMO_PARTS = {
    **PROJECTIONS, **GATED, **QK_NORMS,
    "attention_post_norm": "post_attention_layernorm", "ffn_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
OLMO_KEYS = {"norm_placement": "post", "norm": RMSNorm(eps=EPS), "ffn": SwiGLU(hidden=80)}
OLMO_ATTENTION = GroupedQueryAttention(heads=HEADS, kv_heads=KV_HEADS, qk_norm="all", qk_norm_eps=EPS)


def olmo2() -> Reference:
    config = transformers.Olmo2Config(**SIZES, num_key_value_heads=KV_HEADS, rope_parameters=ROPE, rms_norm_eps=EPS)
    keys = {**OLMO_KEYS, "attention": OLMO_ATTENTION}
    return transformers.Olmo2ForCausalLM(config), keys, lambda state: renamed(state, OLMO_PARTS)


def olmo3() -> Reference:
    ropes = {"full_attention": ROPE, "sliding_attention": ROPE}
    config = transformers.Olmo3Config(
        **SIZES, **MIXED, num_key_value_heads=KV_HEADS, rope_parameters=ropes, rms_norm_eps=EPS
    )
    keys = {**OLMO_KEYS, "attention": windows(OLMO_ATTENTION)}
    return transformers.Olmo3ForCausalLM(config), keys, lambda state: renamed(state, OLMO_PARTS)


def granite() -> Reference:
    config = transformers.GraniteConfig(
        **SIZES, num_key_value_heads=KV_HEADS, rope_parameters=ROPE, rms_norm_eps=EPS, attention_bias=True,
        embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=8.0, attention_multiplier=0.2,
        tie_word_embeddings=False,
    )  # fmt: skip
    parts = {
        **PROJECTIONS, **GATED, "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    keys = {
        "attention": GroupedQueryAttention(heads=HEADS, kv_heads=KV_HEADS, bias=True, scale=0.2),
        "norm": RMSNorm(eps=EPS), "ffn": SwiGLU(hidden=80),
        "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 1 / 8,
    }  # fmt: skip
    return transformers.GraniteForCausalLM(config), keys, lambda state: renamed(state, parts)


GEMMA_PARTS = {
    **PROJECTIONS, **GATED, "attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "ffn_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
GEMMA_SIZES = {
    **SIZES, **MIXED, "num_key_value_heads": KV_HEADS, "head_dim": WIDTH, "query_pre_attn_scalar": PRE_ATTENTION,
    "rms_norm_eps": EPS,
}  # fmt: skip
GEMMA_KEYS = {
    "norm_placement": "both", "norm": RMSNorm(eps=EPS, offset=1), "ffn": GEGLU(hidden=80), "embedding_scale": DIM**0.5,
    "tie_embeddings": True,
}  # fmt: skip
GEMMA_ATTENTION = GroupedQueryAttention(heads=HEADS, kv_heads=KV_HEADS, head_dim=WIDTH, scale=PRE_ATTENTION**-0.5)


def gemma3() -> Reference:
    far = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    ropes = {"sliding_attention": ROPE, "full_attention": far}
    reference = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**GEMMA_SIZES, rope_parameters=ropes))
    attention = evolve(GEMMA_ATTENTION, qk_norm="head", qk_norm_eps=EPS, qk_norm_offset=1)
    keys = {**GEMMA_KEYS, "attention": windows(attention, rope=LinearRope(theta=1e6, factor=8.0))}
    return reference, keys, lambda state: renamed(state, GEMMA_PARTS | QK_NORMS)


def gemma2() -> Reference:
    caps = {"attn_logit_softcapping": SCORE_CAP, "final_logit_softcapping": 2.0, "attn_implementation": "eager"}
    reference = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**GEMMA_SIZES, **caps, rope_parameters=ROPE))
    keys = {**GEMMA_KEYS, "attention": windows(evolve(GEMMA_ATTENTION, soft_cap=SCORE_CAP)), "logit_soft_cap": 2.0}
    return reference, keys, lambda state: renamed(state, GEMMA_PARTS)


def gpt_neox(share: float = 1.0) -> Reference:
    config = transformers.GPTNeoXConfig(
        **SIZES, rope_parameters={**ROPE, "partial_rotary_factor": share}, layer_norm_eps=EPS, hidden_act="gelu"
    )
    reference = transformers.GPTNeoXForCausalLM(config)
    parts = {
        **{f"attention.{name}": f"attention.{name}" for name in "qkv"}, "attention.o": "attention.dense",
        "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "ffn.up": "mlp.dense_h_to_4h", "ffn.down": "mlp.dense_4h_to_h",
    }  # fmt: skip
    ends = {"embedding": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "lm_head"}

    def converted(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        apart = dict(state)
        for name in (name for name in state if "query_key_value" in name):  # rows of each head: query, key and value
            rows = apart.pop(name).unflatten(0, (HEADS, 3, -1))
            apart |= {name.replace("query_key_value", key): rows[:, n].flatten(0, 1) for n, key in enumerate("qkv")}
        return renamed(apart, parts, "gpt_neox.layers", ends)

    rope = PlainRope(partial_rotary_factor=share)
    keys = {
        "attention": GroupedQueryAttention(heads=HEADS, bias=True, rope=rope), "residual": "parallel",
        "norm": LayerNorm(eps=EPS), "ffn": GELU(hidden=80, bias=True, approximate="none"),
    }  # fmt: skip
    return reference, keys, converted


def gpt2() -> Reference:
    config = transformers.GPT2Config(
        n_embd=DIM, n_inner=80, n_layer=LAYERS, n_head=HEADS, vocab_size=VOCABULARY, n_positions=64,
        layer_norm_epsilon=EPS, activation_function="gelu_new", use_cache=False,
    )  # fmt: skip
    reference = transformers.GPT2LMHeadModel(config)
    parts = {
        **{f"attention.{name}": f"attn.{name}" for name in "qkv"}, "attention.o": "attn.c_proj",
        "attention_norm": "ln_1", "ffn_norm": "ln_2", "ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj",
    }  # fmt: skip
    ends = {"embedding": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f"}

    def converted(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Its matrices are (in, out).
        apart = {name: tensor.mT if ".c_" in name and tensor.ndim == 2 else tensor for name, tensor in state.items()}
        for name in (name for name in state if "c_attn" in name):
            thirds = zip("qkv", apart.pop(name).chunk(3), strict=True)
            apart |= {name.replace("c_attn", key): part for key, part in thirds}
        return renamed(apart, parts, "transformer.h", ends)

    keys = {
        "attention": GroupedQueryAttention(heads=HEADS, bias=True, rope=NoRope()), "learned_positions": 64,
        "norm": LayerNorm(eps=EPS), "ffn": GELU(hidden=80, bias=True), "tie_embeddings": True,
    }  # fmt: skip
    return reference, keys, converted


ARCHITECTURES: Mapping[str, Callable[[], Reference]] = {
    "OLMo 2": olmo2,
    "OLMo 3": olmo3,
    "Granite": granite,
    "Gemma 3": gemma3,
    "Gemma 2": gemma2,
    "GPT-NeoX": gpt_neox,
    "Pythia": lambda: gpt_neox(share=0.5),
    "GPT-2": gpt2,
}


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Where a reference names float32, it gets `dtype`."""
    with pytest.MonkeyPatch.context() as patch:
        if dtype == torch.float64:
            patch.setattr(torch, "float32", torch.float64)
            patch.setattr(torch, "float", torch.float64)
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(VOCABULARY, (2, 48), generator=torch.Generator().manual_seed(1))


def difference(make_model: Callable[..., Any], name: str, dtype: torch.dtype, ids: Tensor, **changes: Any) -> float:
    """The largest of the logits; `changes`: keys of our model other than the reference's."""
    torch.manual_seed(0)
    with computing_in(dtype), torch.no_grad():
        reference, keys, converted = ARCHITECTURES[name]()
        for parameter in reference.parameters():
            parameter.normal_(0.5 if parameter.ndim == 1 else 0.0, 0.2)
        expected = reference.eval()(ids).logits
    model = make_model(dtype=dtype, **{"dim": DIM, "layers": LAYERS, "vocab_size": VOCABULARY, **keys, **changes})
    state = converted(dict(reference.named_parameters()))
    assert state.keys() == dict(model.named_parameters()).keys()
    model.load_state_dict(state, strict=False)
    assert expected.std() > 0.05
    with torch.no_grad():
        return (model.head.logits(model({"input_ids": ids})) - expected).abs().max().item()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_the_references(
    make_model: Callable[..., Any], ids: Tensor, name: str, dtype: torch.dtype, tolerance: float
) -> None:
    assert difference(make_model, name, dtype, ids) < tolerance


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Gemma 3", {"norm": RMSNorm(eps=EPS)}),
        ("Gemma 3", {"embedding_scale": 1.0}),
        ("Gemma 3", {"ffn": SwiGLU(hidden=80)}),
        ("Gemma 2", {"logit_soft_cap": 0.0}),
        ("Gemma 2", {"attention": windows(GEMMA_ATTENTION)}),
        ("OLMo 3", {"attention": OLMO_ATTENTION}),
        ("Granite", {"logit_scale": 1.0}),
        ("Granite", {"residual_scale": 1.0}),
        ("GPT-NeoX", {"residual": "sequential"}),
        ("Pythia", {"attention": GroupedQueryAttention(heads=HEADS, bias=True)}),
    ],
)
def test_another_key_would_not_pass(
    make_model: Callable[..., Any], ids: Tensor, name: str, changes: dict[str, Any]
) -> None:
    """Keys that leave the names of parameters as they are."""
    assert difference(make_model, name, torch.float32, ids, **changes) > 1e-2
