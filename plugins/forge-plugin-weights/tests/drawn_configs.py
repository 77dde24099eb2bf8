"""Configurations that hypothesis draws: for each architecture, values that it supports for every key that it reads."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from attrs import frozen
from hypothesis import strategies as st

from forge_core.plugins.catalog import Catalog
from forge_plugin_weights.architectures import mimo
from forge_plugin_weights.kinds import ArchitectureComponent
from forge_plugin_weights.tables import all_fields, architectures

SEEING = (
    *("siglip_vision_model", "siglip2_vision_model", "clip_vision_model"),
    *("llava", "llava_next", "llava_onevision", "idefics3", "smolvlm", "mllama", "mllama_vision_model", "paligemma"),
    *("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "internvl", "mistral3", "llama4", "gemma4"),
    "kimi_k25",
)
"""Towers, and models that see images: drawn_vision_configs.py has those."""
INSTALLED: Mapping[str, ArchitectureComponent] = architectures(Catalog.installed())
ARCHITECTURES = {type_: each for type_, each in INSTALLED.items() if type_ not in SEEING}
"""All others; a new one fails until there are values for each of its keys here."""
MANY = 2 if os.environ.get("FORGE_TESTS") == "all" else 1
"""Times as many examples as otherwise."""
ELSEWHERE: Mapping[str, str] = {"quantization_config": "test_weights_deepseek.py, test_weights_gpt_oss.py"}
"""Keys that no configuration here has, and the tests that are about them."""


@frozen
class Sizes:
    """Numbers that several keys depend on."""

    layers: int
    heads: int
    width: int
    window: int | None
    windowed: bool
    """Whether layers may have the window."""
    experts: int
    expert_width: int
    groups: int


Draw = Callable[[Sizes], st.SearchStrategy[Any]]

WIDTHS = st.integers(1, 99)
EPS = st.sampled_from([1e-5, 1e-6, 1e-8, 3e-6]) | st.floats(1e-12, 1e-2)
FACTORS = st.sampled_from([0.015625, 0.1, 0.22, 0.3, 1.0, 3.0, 7.0, 16.0, 49.0]) | st.floats(0.01, 100)
RATES = st.sampled_from([0.0, 0.1])
HEADS = st.sampled_from([8, 16, 32, 128])
GELU = st.sampled_from(["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"])


def same(strategy: st.SearchStrategy[Any]) -> Draw:
    """A strategy that no size changes."""
    return lambda sizes: strategy


def by_layer(entries: list[Any]) -> Draw:
    """A list with one of several entries for each layer."""
    return lambda sizes: st.lists(st.sampled_from(entries), min_size=sizes.layers, max_size=sizes.layers)


def types(sizes: Sizes) -> st.SearchStrategy[Any]:
    """Types of layers; with a window only where there is one."""
    return by_layer(["full_attention", *(["sliding_attention"] if sizes.window and sizes.windowed else [])])(sizes)


def linear_table(sizes: Sizes) -> st.SearchStrategy[Any]:
    """The table of Kimi Linear, where layers count from 1."""
    layers = st.lists(st.booleans(), min_size=sizes.layers, max_size=sizes.layers)
    return st.tuples(layers, st.integers(1, 4), HEADS, st.integers(1, 4)).map(
        lambda drawn: {
            "full_attn_layers": [number for number, full in enumerate(drawn[0], 1) if full],
            "kda_layers": [number for number, full in enumerate(drawn[0], 1) if not full],
            **dict(zip(("num_heads", "head_dim", "short_conv_kernel_size"), drawn[1:], strict=True)),
        }
    )


ALWAYS: Mapping[str, Draw] = {
    **dict.fromkeys(("hidden_size", "n_embd"), lambda sizes: st.just(sizes.width)),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), lambda sizes: st.just(sizes.layers)),
    **dict.fromkeys(("num_attention_heads", "n_head"), lambda sizes: st.just(sizes.heads)),
    **dict.fromkeys(("vocab_size", "intermediate_size"), same(st.integers(1, 300_000))),
    "n_positions": same(WIDTHS),
    "moe_intermediate_size": lambda sizes: st.just(sizes.expert_width),
    "shared_expert_intermediate_size": lambda sizes: st.integers(1, 4).map(lambda n: n * sizes.expert_width),
    **dict.fromkeys(("num_local_experts", "n_routed_experts"), lambda sizes: st.just(sizes.experts)),
    "num_experts": lambda sizes: st.just(sizes.experts),
    "num_experts_per_tok": same(st.integers(1, 2)),
    "n_group": lambda sizes: st.just(sizes.groups),
    "topk_group": lambda sizes: st.integers(1, sizes.groups),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim"), same(WIDTHS)),
    "v_head_dim": same(st.integers(1, 8)),  # keys are as wide at least
    "qk_rope_head_dim": same(HEADS),
    "sliding_window": lambda sizes: st.just(sizes.window),
    "use_sliding_window": lambda sizes: st.just(sizes.window is not None and sizes.windowed),
    "num_nextn_predict_layers": same(st.integers(0, 2)),
    "shared_intermediate_size": same(st.just(0)),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), same(st.sampled_from([2, 4, 8]))),
    "layers_block_type": by_layer(["mamba", "linear_attention", "attention", "full_attention", "mlp", "moe"]),
    "moe_shared_expert_intermediate_size": lambda sizes: st.integers(1, 4).map(lambda n: n * sizes.expert_width),
    "n_groups": same(st.sampled_from([1, 2])),
    "hidden_size_per_layer_input": same(st.sampled_from([0, 4, 256])),
    "pad_token_id": same(st.integers(0, 2)),
    "enable_moe_block": lambda sizes: st.just(sizes.groups == 2),
    "num_kv_shared_layers": same(st.just(0)),  # of which there are 15, where a class has another number of layers
    "top_k_experts": same(st.integers(1, 2)),
}
"""Keys that all configurations of an architecture have which reads them."""
OPTIONAL: Mapping[str, Draw] = {
    "tie_word_embeddings": same(st.booleans()),
    **dict.fromkeys(
        (
            "attention_dropout",
            "resid_pdrop",
            "embd_pdrop",
            "attn_pdrop",
            "hidden_dropout",
            "residual_dropout",
            "embedding_dropout",
        ),
        same(RATES),
    ),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"), same(EPS)),
    "hidden_act": same(st.just("silu")),
    "num_key_value_heads": lambda sizes: st.sampled_from([n for n in (1, 2, 4, 8) if sizes.heads % n == 0]),
    "head_dim": same(HEADS),
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "norm_topk_prob", "use_bias"), same(st.booleans())),
    "layer_types": types,
    "max_window_layers": lambda sizes: st.integers(0, sizes.layers + 1),
    "sliding_window_pattern": same(st.integers(1, 7)),
    "q_lora_rank": same(st.none() | WIDTHS),
    "rope_interleave": same(st.booleans()),
    "n_shared_experts": same(st.integers(0, 3)),
    "first_k_dense_replace": lambda sizes: st.integers(0, sizes.layers),
    "moe_layer_freq": same(st.integers(1, 3)),
    "decoder_sparse_step": same(st.integers(1, 3)),
    "mlp_only_layers": same(st.just([])),
    "routed_scaling_factor": same(FACTORS),
    "scoring_func": same(st.just("sigmoid")),
    "topk_method": same(st.just("noaux_tc")),
    "query_pre_attn_scalar": same(st.integers(1, 999)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), same(st.none() | FACTORS)),
    "use_bidirectional_attention": same(st.sampled_from([False, None])),
    "hidden_activation": same(st.sampled_from(["gelu_pytorch_tanh", "gelu"])),
    "n_inner": same(st.none() | WIDTHS),
    "activation_function": same(GELU),
    "scale_attn_weights": same(st.just(True)),
    **dict.fromkeys(("scale_attn_by_inverse_layer_idx", "add_cross_attention"), same(st.just(False))),
    "use_parallel_residual": same(st.booleans()),
    "swiglu_alpha": same(FACTORS),
    "swiglu_limit": same(FACTORS),
    **dict.fromkeys(("attention_multiplier", "embedding_multiplier", "residual_multiplier"), same(FACTORS)),
    "logits_scaling": same(st.sampled_from([1.0, 3.0, 7.0, 8.0, 16.0, 49.0, 0.3])),
    **dict.fromkeys(("rope_interleaved", "use_mrope", "lm_head_bias"), same(st.just(False))),
    "router_jitter_noise": same(st.just(0.0)),
    **dict.fromkeys(("full_attn_mod", "interpolate_factor"), same(st.just(1))),
    "qk_layernorm": same(st.just(False)),
    "logit_scale": same(FACTORS),
    "order_of_interleaved_layers": same(st.just("local_attn_first")),
    "position_embedding_type": same(st.just("rope_gptj")),
    "rotary_pct": same(st.just(1.0)),
    **dict.fromkeys(("use_gated_activation", "use_parallel_block", "use_embedding_sharing"), same(st.just(True))),
    "use_qk_norm": same(st.booleans()),
    "clip_qkv": same(st.none()),
    "attention_out_bias": same(st.just(False)),
    "use_routing_bias": same(st.just(True)),
    "qk_norm_type": same(st.just("per_layer")),
    "attn_type_list": by_layer([1]),
    "no_rope_layers": by_layer([0, 1]),
    "no_rope_layer_interval": same(st.integers(1, 7)),
    **dict.fromkeys(("linear_num_key_heads", "linear_key_head_dim", "linear_conv_kernel_dim"), same(st.integers(1, 4))),
    **dict.fromkeys(("linear_num_value_heads", "linear_value_head_dim"), same(st.just(12))),
    "full_attention_interval": same(st.integers(1, 5)),
    "linear_num_heads": same(st.integers(1, 4)),
    "num_expert_group": lambda sizes: st.just(sizes.groups),
    "linear_head_dim": same(HEADS),
    "linear_attn_config": linear_table,
    **dict.fromkeys(("index_n_heads", "index_topk"), same(WIDTHS)),
    "index_head_dim": same(st.sampled_from([128, 256])),  # of which the rotated part is one
    "index_topk_freq": same(st.just(1)),
    "index_topk_pattern": same(st.none()),
    "indexer_types": by_layer(["full"]),
    "moe_k": same(st.integers(1, 2)),
    "moe_num_experts": lambda sizes: st.just(sizes.experts),
    "moe_num_shared_experts": same(st.integers(0, 3)),
    "moe_layer_start_index": lambda sizes: st.integers(0, sizes.layers),
    "moe_layer_end_index": lambda sizes: st.sampled_from([-1, sizes.layers - 1]),
    "moe_layer_interval": same(st.just(1)),
    "mlp_layer_types": lambda sizes: st.integers(0, sizes.layers).map(
        lambda first: ["dense"] * first + ["sparse"] * (sizes.layers - first)
    ),
    "mla_use_nope": same(st.just(True)),
    "moe_renormalize": same(st.sampled_from([True, False, None])),
    "moe_router_activation_func": same(st.just("sigmoid")),
    "num_shared_experts": same(st.integers(0, 3)),
    "num_experts_per_token": same(st.integers(1, 2)),
    "num_dense_layers": lambda sizes: st.integers(0, sizes.layers),
    "use_expert_bias": same(st.just(True)),
    "conv_L_cache": same(st.integers(1, 5)),
    "full_attn_idxs": lambda sizes: st.none() | st.lists(st.integers(0, sizes.layers - 1), unique=True),
    "block_ff_dim": same(st.integers(1, 99_999)),
    "block_auto_adjust_ff_dim": same(st.booleans()),
    "block_ffn_dim_multiplier": same(st.sampled_from([1.0, 1.3])),
    "block_multiple_of": same(st.sampled_from([1, 8, 256])),
    "conv_bias": same(st.just(False)),
    **dict.fromkeys(("use_pos_enc", "block_use_swiglu"), same(st.just(True))),
    **dict.fromkeys(("use_cla", "post_norm"), same(st.just(False))),
    "qk_norm": same(st.just(True)),
    "attn_layer_indices": lambda sizes: st.lists(st.integers(0, sizes.layers - 1), min_size=1, unique=True).map(sorted),
    **dict.fromkeys(("mamba_d_state", "mamba_d_conv"), same(st.integers(1, 9))),
    "mamba_d_head": same(st.just("auto")),
    "mamba_expand": same(st.integers(1, 3)),
    "mamba_n_groups": same(st.sampled_from([1, 2])),
    **dict.fromkeys(("mamba_conv_bias", "mamba_proj_bias"), same(st.sampled_from([True, False, None]))),
    "time_step_limit": same(st.sampled_from([[0.0, math.inf], [0.001, 0.1]])),
    **dict.fromkeys(
        (
            *("attention_in_multiplier", "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
            *("lm_head_multiplier", "key_multiplier"),
        ),
        same(FACTORS),
    ),
    "mlp_multipliers": same(st.lists(FACTORS, min_size=2, max_size=2)),
    "ssm_multipliers": same(st.lists(FACTORS, min_size=5, max_size=5)),
    **dict.fromkeys(("mamba_rms_norm", "mamba_norm_before_gate"), same(st.booleans())),
    "projectors_bias": same(st.just(False)),
    "mamba_use_mlp": same(st.just(True)),
    "mamba_d_ssm": same(st.sampled_from([64, 128])),
    **dict.fromkeys(("mamba_head_dim", "ssm_state_size", "conv_kernel"), same(st.integers(1, 9))),
    "use_conv_bias": same(st.booleans()),
    "time_step_min": same(st.sampled_from([0.001, 0.01])),
    "mamba_hidden_act": same(st.just("silu")),
    "mlp_hidden_act": same(st.just("relu2")),
    "residual_in_fp32": same(st.just(False)),
    "moe_latent_size": same(st.none()),
    "attn_output_gate": same(st.just(True)),
    "output_gate_type": same(st.sampled_from(["swish", "silu"])),
    "activation_sparsity_pattern": by_layer([0.0, 0.5, 0.95]),
    "altup_num_inputs": same(st.integers(2, 5)),
    "altup_active_idx": same(st.integers(0, 1)),
    "altup_coef_clip": same(FACTORS),
    "altup_correct_scale": same(st.just(True)),
    "laurel_rank": same(st.integers(1, 64)),
    "global_head_dim": same(HEADS),
    "num_global_key_value_heads": lambda sizes: st.sampled_from([n for n in (1, 2, 4, 8) if sizes.heads % n == 0]),
    "attention_k_eq_v": same(st.booleans()),
    "attention_value_scale": same(st.none() | FACTORS),
    "vocab_size_per_layer_input": same(WIDTHS),
    "use_double_wide_mlp": same(st.booleans()),
    "attention_chunk_size": same(st.integers(1, 9999)),
    "attn_temperature_tuning": same(st.booleans()),
    "attn_scale": same(FACTORS),
    "floor_scale": same(st.integers(1, 9999)),
    "intermediate_size_mlp": same(WIDTHS),
    "interleave_moe_layer_step": same(st.integers(1, 3)),
    "moe_layers": lambda sizes: st.tuples(st.integers(0, sizes.layers), st.integers(1, 3)).map(
        lambda drawn: [*range(drawn[0] + drawn[1] - 1, sizes.layers, drawn[1])]
    ),
}
"""Keys that a configuration may lack."""
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Architectures with Gated DeltaNet in some layers."""
INDEXED = ("deepseek_v32", "glm_moe_dsa")
"""Architectures whose attention has an indexer."""
OWN: Mapping[tuple[str, str], Draw] = {
    ("gpt_neox", "hidden_act"): same(GELU),
    ("gemma", "hidden_act"): same(st.just("gelu_pytorch_tanh")),
    ("gemma", "hidden_activation"): same(st.sampled_from(["gelu_pytorch_tanh", None])),
    **{(type_, "hidden_act"): same(GELU) for type_ in ("starcoder2", "phi")},
    ("cohere2", "use_qk_norm"): same(st.just(False)),
    ("minimax_m2", "use_qk_norm"): same(st.just(True)),
    ("qwen3_next", "use_sliding_window"): same(st.just(False)),
    **{(type_, "layer_types"): by_layer(["linear_attention", "full_attention"]) for type_ in HYBRIDS},
    ("granitemoehybrid", "layer_types"): by_layer(["mamba", "attention", "linear_attention", "full_attention"]),
    ("granitemoehybrid", "intermediate_size"): lambda sizes: st.just(sizes.expert_width),
    ("granitemoehybrid", "shared_intermediate_size"): lambda sizes: st.integers(1, 4).map(
        lambda n: n * sizes.expert_width
    ),
    ("granitemoehybrid", "num_local_experts"): lambda sizes: st.sampled_from([0, sizes.experts]),
    ("granitemoehybrid", "position_embedding_type"): same(st.sampled_from(["rope", "nope", None])),
    **{(type_, "layer_types"): by_layer(["conv", "full_attention"]) for type_ in ("lfm2", "lfm2_moe")},
    ("kimi_linear", "layer_types"): by_layer(["linear_attention", "full_attention"]),
    **{("kimi_linear", key): same(st.just(False)) for key in ("tie_word_embeddings", "attention_bias")},
    ("kimi_linear", "num_nextn_predict_layers"): same(st.just(0)),
    ("kimi_linear", "moe_layer_freq"): same(st.just(1)),
    ("kimi_linear", "topk_group"): same(st.just(1)),
    **{(type_, "hidden_act"): same(st.just("relu2")) for type_ in ("arcee", "nemotron")},
    ("gemma3n_text", "hidden_size_per_layer_input"): same(st.sampled_from([4, 256])),
    ("gemma3n_text", "final_logit_softcapping"): same(FACTORS),
    ("gemma3n_text", "intermediate_size"): lambda sizes: WIDTHS | by_layer([8, 99])(sizes),
    ("gemma3n_text", "layer_types"): lambda sizes: by_layer(["full_attention", "sliding_attention"])(sizes).map(
        lambda drawn: [*("sliding_attention", "full_attention")[: sizes.layers], *drawn[2:]]
    ),
    ("gemma4_text", "intermediate_size"): lambda sizes: st.integers(1, 4).map(lambda n: n * sizes.expert_width),
    # With experts, one activation, and layers that are all alike
    ("gemma4_text", "hidden_activation"): lambda sizes: st.sampled_from(
        ["gelu_pytorch_tanh", "gelu"][: 3 - sizes.groups]
    ),
    ("gemma4_text", "use_double_wide_mlp"): lambda sizes: st.booleans().map(lambda drawn: drawn and sizes.groups == 1),
    # Those before the ones that share keys are of all types
    ("gemma4_text", "layer_types"): lambda sizes: by_layer(["full_attention", "sliding_attention"])(sizes).map(
        lambda drawn: [*("sliding_attention", "full_attention")[: sizes.layers], *drawn[2:]]
    ),
    **{
        (type_, "num_kv_shared_layers"): lambda sizes: st.integers(0, max(0, sizes.layers - 2))
        for type_ in ("gemma4_text", "gemma3n_text")
    },
    ("gemma4_text", "use_bidirectional_attention"): same(st.sampled_from(["vision", None])),
    ("gemma4_text", "is_causal"): same(st.just(True)),
    ("mimo_v2_flash", "n_shared_experts"): same(st.sampled_from([0, None])),
    ("llama4_text", "layer_types"): by_layer(["chunked_attention", "full_attention"]),
    **{
        ("nemotron_h", key): same(st.just(False))
        for key in ("tie_word_embeddings", "attention_bias", "mlp_bias", "mamba_proj_bias")
    },
    ("falcon_h1", "mamba_proj_bias"): same(st.just(False)),
    ("falcon_h1", "attn_layer_indices"): same(st.none()),
    ("falcon_h1", "mamba_conv_bias"): same(st.booleans()),
    ("nemotron_h", "n_shared_experts"): same(st.just(1)),
    ("nemotron_h", "sliding_window"): same(st.none()),
    ("nemotron_h", "time_step_limit"): same(st.just([0.0, math.inf])),
    ("apertus", "hidden_act"): same(st.just("xielu")),
    ("apertus", "mlp_bias"): same(st.just(False)),
    ("hunyuan_v1_dense", "use_qk_norm"): same(st.just(True)),
    ("hunyuan_v1_dense", "mlp_bias"): same(st.just(False)),
    ("minimax_m2", "sliding_window"): same(st.none()),
    ("minimax_m2", "attention_bias"): same(st.just(False)),
    **{("phi3", key): same(st.just(False)) for key in ("attention_bias", "mlp_bias")},
    **{(type_, "attention_bias"): same(st.just(False)) for type_ in ("deepseek_v3", "kimi_k2", *INDEXED)},
    **{(type_, "mlp_bias"): same(st.just(False)) for type_ in INDEXED},
    **{(type_, "layer_types"): by_layer(["indexed_attention"]) for type_ in INDEXED},
    **{(type_, "q_lora_rank"): same(WIDTHS) for type_ in INDEXED},
    **{(type_, "rope_interleave"): same(st.just(True)) for type_ in INDEXED},
    **{(type_, "moe_layer_freq"): same(st.just(1)) for type_ in INDEXED},
    ("ernie4_5_moe", "use_bias"): same(st.just(False)),
    ("ernie4_5_moe", "moe_norm_min"): same(st.just(1e-12)),
    ("deepseek_v32", "indexer_rope_interleave"): same(st.just(False)),
    ("glm_moe_dsa", "indexer_rope_interleave"): same(st.just(True)),
}
"""Keys that one architecture supports other values of."""
UNREAD: Mapping[str, tuple[str, ...]] = {
    "qwen2_moe": ("num_local_experts",),
    "qwen3_moe": ("num_local_experts",),
    "gpt_oss": ("num_experts",),
    **dict.fromkeys(("olmoe", "qwen3_next", "qwen3_5_moe_text"), ("num_local_experts",)),
    "minimax_m2": ("num_experts", "rotary_dim"),
    "gemma4_text": ("per_layer_config",),
    "mimo_v2_flash": (*mimo.REPEATED, "sliding_window_size", "rope_scaling"),
    "nemotron_h": (
        *("hybrid_override_pattern", "layer_types", "num_local_experts", "norm_eps", "rms_norm_eps"),
        *("mamba_n_groups", "mamba_d_conv", "mamba_conv_bias", "attention_head_dim", "num_query_groups"),
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe"), ("tie_embedding",)),
}
"""Other names of keys, which a configuration does not have beside them."""

# --- position encodings ------------------------------------------------------------------------------------------

THETAS = st.sampled_from([10000.0, 500000.0, 1e6]) | st.floats(2, 1e7)
LENGTHS = st.integers(16, 131072)
LISTS = st.lists(st.floats(1, 60), min_size=1, max_size=3)


def maybe(strategy: st.SearchStrategy[Any], **keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """The table of a strategy, with further keys that may be missing."""
    further = st.fixed_dictionaries({}, optional=keys)
    return st.tuples(strategy, further).map(lambda pair: {**pair[0], **pair[1]})


def table(rope_type: str, **keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Tables of a form of the position encoding."""
    return st.fixed_dictionaries({"rope_type": st.just(rope_type), **keys})


ORIGINAL = {"original_max_position_embeddings": LENGTHS}
ORIGINALS = st.fixed_dictionaries(ORIGINAL)
PLAIN = table("default")
SCALED = (
    table("linear", factor=st.floats(1, 100)),
    table("dynamic", factor=st.floats(1, 100)),
    table("llama3", factor=st.floats(1, 100), low_freq_factor=st.just(1.0), high_freq_factor=st.just(4.0), **ORIGINAL),
    maybe(
        table("yarn", factor=st.floats(1, 100), **ORIGINAL),
        beta_fast=st.floats(8, 64),
        beta_slow=st.floats(0.5, 4),
        attention_factor=FACTORS,
        mscale=FACTORS,
        mscale_all_dim=FACTORS,
        truncate=st.booleans(),
    ),
    maybe(
        table("longrope", short_factor=LISTS, long_factor=LISTS, factor=st.floats(1, 100), **ORIGINAL),
        attention_factor=FACTORS,
    ),
)
SPELLINGS = ("4", "5", "both")


@st.composite
def ropes(draw: st.DrawFn, *tables: st.SearchStrategy[Any]) -> dict[str, Any]:
    """A position encoding as version 4 of `transformers` spells it, as version 5 does, or both."""
    form, theta, spelling = draw(st.one_of(PLAIN, *tables)), draw(THETAS), draw(st.sampled_from(SPELLINGS))
    keys: dict[str, Any] = {"max_position_embeddings": draw(LENGTHS)}
    if spelling != "5":
        name = draw(st.sampled_from(["type", "rope_type"]))
        scaling = {name: form["rope_type"], **{key: value for key, value in form.items() if key != "rope_type"}}
        keys |= {"rope_theta": theta, "rope_scaling": None if form["rope_type"] == "default" else scaling}
    if spelling != "4":
        keys["rope_parameters"] = {**form, "rope_theta": theta}
    return keys


@st.composite
def phi_ropes(draw: st.DrawFn, width: int) -> dict[str, Any]:
    """Phi-3's: a part of each head, of which there are `width` numbers, and lengths beside the table."""
    share = draw(st.none() | st.sampled_from([0.25, 0.75, 1.0]))
    pairs = int(width * (1.0 if share is None else share)) // 2
    factors = st.lists(st.floats(1, 60), min_size=pairs, max_size=pairs)
    keys = draw(ropes(table("longrope", short_factor=factors, long_factor=factors)))
    original = keys["original_max_position_embeddings"] = draw(st.sampled_from([1024, 4096]))
    keys["max_position_embeddings"] = original * draw(st.integers(1, 32))
    if share is not None:
        keys["partial_rotary_factor"] = share
        if "rope_parameters" in keys:
            keys["rope_parameters"]["partial_rotary_factor"] = share
    return keys


@st.composite
def neox_ropes(draw: st.DrawFn) -> dict[str, Any]:
    """GPT-NeoX's, which has keys of its own in version 4."""
    keys, share = draw(ropes(*SCALED[:2])), draw(st.none() | st.sampled_from([0.25, 0.5, 1.0]))
    if "rope_theta" in keys:
        keys["rotary_emb_base"] = keys["rope_theta"] if draw(st.booleans()) else keys.pop("rope_theta")
    if share is not None:
        keys["rotary_pct"] = share
        if "rope_parameters" in keys:
            keys["rope_parameters"]["partial_rotary_factor"] = share
        if draw(st.booleans()):
            keys["partial_rotary_factor"] = share
    return keys


@st.composite
def shared_ropes(draw: st.DrawFn, *tables: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Those of a part of each head, whose share has its usual name."""
    keys, share = draw(ropes(*tables)), draw(st.none() | st.sampled_from([0.25, 0.5, 1.0]))
    if share is not None:
        if "rope_parameters" in keys:
            keys["rope_parameters"]["partial_rotary_factor"] = share
        if "rope_theta" in keys:
            keys["partial_rotary_factor"] = share
    return keys


@st.composite
def half_ropes(draw: st.DrawFn, *tables: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Bamba's, whose share is a half unless the table of version 5 has another."""
    keys, share = draw(ropes(*tables)), draw(st.none() | st.sampled_from([0.25, 0.5, 1.0]))
    if share is not None and keys.keys() == {"max_position_embeddings", "rope_parameters"}:
        keys["rope_parameters"]["partial_rotary_factor"] = share
    return keys


@st.composite
def window_ropes(draw: st.DrawFn, near_theta: str, *tables: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Two: of layers with a window, and of those without."""
    full, near = draw(st.one_of(PLAIN, *tables)), {"rope_type": "default"}
    theta, near_base = draw(THETAS), draw(THETAS)
    keys: dict[str, Any] = {"max_position_embeddings": draw(LENGTHS)}
    if draw(st.booleans()):
        if near_theta == "rope_theta":  # of another base, version 5 forgets that it is that of windows, too
            theta = near_base = 500000.0
        scaling = None if full["rope_type"] == "default" else full
        return {**keys, "rope_theta": theta, near_theta: near_base, "rope_scaling": scaling}
    both = {"full_attention": {**full, "rope_theta": theta}, "sliding_attention": {**near, "rope_theta": near_base}}
    return {**keys, "rope_parameters": both}


@st.composite
def ropes_by_type(draw: st.DrawFn) -> dict[str, Any]:
    """Gemma 4's: a table for each type of layer, or none at all."""
    turning = {"partial_rotary_factor": st.sampled_from([0.25, 1.0]), "factor": st.floats(1, 100)}
    full, theta, near = draw(PLAIN | maybe(table("proportional"), **turning)), draw(THETAS), draw(THETAS)
    both = {"full_attention": {**full, "rope_theta": theta}}
    both["sliding_attention"] = {"rope_type": "default", "rope_theta": near}
    return {"max_position_embeddings": draw(LENGTHS), **({"rope_parameters": both} if draw(st.booleans()) else {})}


@st.composite
def ropes_by_share(draw: st.DrawFn) -> dict[str, Any]:
    """MiMo's: a table for each type of layer, with the share of a head that is rotated, or none at all."""
    share = st.fixed_dictionaries({}, optional={"partial_rotary_factor": st.sampled_from([0.25, 0.334, 1.0])})
    names = ("full_attention", "sliding_attention")
    both = {name: {"rope_type": "default", "rope_theta": draw(THETAS), **draw(share)} for name in names}
    return {"max_position_embeddings": draw(LENGTHS), **({"rope_parameters": both} if draw(st.booleans()) else {})}


@st.composite
def growing_ropes(draw: st.DrawFn) -> dict[str, Any]:
    """Ministral 3's, with the growth of queries."""
    keys, growth = draw(ropes(*SCALED)), draw(ORIGINALS)
    growth["llama_4_scaling_beta"] = draw(st.sampled_from([0.0, 0.1]))
    if keys.get("rope_scaling") is None:
        keys.pop("rope_scaling", None)
    for name in ("rope_scaling", "rope_parameters"):
        if name in keys:
            keys[name] = {**growth, **keys[name]}
    if not {"rope_scaling", "rope_parameters"} & keys.keys():
        keys["rope_parameters"] = {"rope_type": "default", "rope_theta": keys["rope_theta"], **growth}
    return keys


@st.composite
def ropes_in_tables(draw: st.DrawFn, *tables: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Those of a class whose encoding is stretched where a file has no table."""
    keys = draw(ropes(*tables))
    if not any(keys.get(name) for name in ("rope_scaling", "rope_parameters")):
        keys["rope_scaling"] = {"rope_type": "default"}
    return keys


@st.composite
def alpha_ropes(draw: st.DrawFn) -> dict[str, Any]:
    """Hunyuan's, some of whose bases are stretched."""
    keys = draw(ropes(*SCALED[:2]))
    if draw(st.booleans()):
        alpha = {"rope_type": "dynamic", "alpha": draw(st.sampled_from([1.5, 1000.0])), "factor": 1.0}
        keys["rope_theta"] = theta = draw(THETAS)
        keys |= {"rope_scaling": alpha, "rope_parameters": {**alpha, "rope_theta": theta}}
    return keys


ROPES: Mapping[str, st.SearchStrategy[dict[str, Any]]] = {
    **dict.fromkeys(("gpt2", "kimi_linear", "nemotron_h"), st.just({})),
    "phi": shared_ropes(*SCALED[:2]),
    "gpt_neox": neox_ropes(),
    "ministral3": growing_ropes(),
    "apertus": ropes_in_tables(*SCALED),
    "hunyuan_v1_dense": alpha_ropes(),
    "nemotron": shared_ropes(*SCALED[:2]),
    **dict.fromkeys(("glm", "glm4", "glm4_moe", "minimax_m2", *HYBRIDS), shared_ropes(*SCALED[:2])),
    **dict.fromkeys(
        ("mixtral", "ministral", "olmoe", "granitemoehybrid"), ropes(*SCALED[:4])
    ),  # version 5 fails at LongRoPE without head_dim
    "bamba": half_ropes(*SCALED[:4]),
    "gemma3_text": window_ropes("rope_local_base_freq", *SCALED[:1], *SCALED[2:4]),
    "gemma4_text": ropes_by_type(),
    "mimo_v2_flash": ropes_by_share(),
    "gemma3n_text": window_ropes("rope_local_base_freq", *SCALED[:1], *SCALED[2:4]),
    "olmo3": window_ropes("rope_theta", *SCALED[:1], *SCALED[2:4]),
}
"""Where they are not those of most."""
SET_BY_ROPES = {
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_emb_base", "rotary_pct"),
    *("rope_local_base_freq", "max_position_embeddings", "original_max_position_embeddings"),
}

# --- whole configurations ----------------------------------------------------------------------------------------


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    """Sizes of a model."""
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    return Sizes(
        layers=draw(st.integers(1, 6)),
        heads=heads,
        width=heads * draw(HEADS),
        window=draw(st.none() | st.integers(1, 9999)),
        windowed=draw(st.booleans()),
        experts=draw(st.sampled_from([4, 8])),
        expert_width=draw(WIDTHS),
        groups=draw(st.sampled_from([1, 2])),
    )


def keys_of(type_: str) -> list[str]:
    """All keys that an architecture reads, in one order."""
    return sorted({key for field in all_fields(ARCHITECTURES[type_]) for key in field.keys})


@st.composite
def configs(draw: st.DrawFn, type_: str) -> dict[str, Any]:
    """A configuration of an architecture. A key that nothing here draws is a `KeyError`: give it values above."""
    own, keys = draw(sizes()), keys_of(type_)
    if "layer_types" in keys and "use_sliding_window" not in keys:  # there is a window always
        own = attrs.evolve(own, window=own.window or 7, windowed=True)
    config: dict[str, Any] = {}
    for key in keys:
        if key in ELSEWHERE or key in SET_BY_ROPES or key in UNREAD.get(type_, ()):
            continue
        if key in ALWAYS:
            config[key] = draw((OWN.get((type_, key)) or ALWAYS[key])(own))
        elif draw(st.booleans()):
            config[key] = draw((OWN.get((type_, key)) or OPTIONAL[key])(own))
    if type_ == "helium":  # whose heads divide the width
        config["head_dim"] = own.width // own.heads
    if type_ == "phi3":  # likewise
        config.pop("head_dim", None)
        config |= draw(phi_ropes(own.width // own.heads))
    else:
        config |= draw(ROPES.get(type_, ropes(*SCALED)))
    if type_ == "gpt2":
        config.pop("max_position_embeddings", None)
    return {"model_type": type_, **config}
