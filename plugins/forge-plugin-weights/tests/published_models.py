"""Tiny published models with random norms and biases, written as `transformers` writes them, and Forge's of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers
from attrs import frozen
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forge_core.checkpoint.resume import locate
from forge_core.config.load import parse_job
from forge_core.engine.build import build_context, build_model
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.checkpoints import load_model

VOCABULARY = 64
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXPERTS: Mapping[str, Any] = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
QWEN3_NEXT: Mapping[str, Any] = {
    **EXPERTS,
    "head_dim": 16,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
QWEN3_5: Mapping[str, Any] = {
    **{key: value for key, value in QWEN3_NEXT.items() if key.startswith("linear_") or key == "layer_types"},
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}
LFM2: Mapping[str, Any] = {
    "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 8,
    "conv_L_cache": 4,
    "layer_types": ["conv", "full_attention", "conv"],
}
LFM2_MOE: Mapping[str, Any] = {
    **EXPERTS,
    "num_dense_layers": 1,
    "conv_L_cache": 4,
    "layer_types": ["conv", "full_attention", "conv"],
}
KIMI_LINEAR: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "max_position_embeddings": ...,
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    "kv_lora_rank": 16,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "linear_num_heads": 2,
    "linear_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
LLAMA3: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC: Mapping[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
"""For sequences that are longer than `max_position_embeddings`, which is the original length."""
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 24.0,
    "beta_slow": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
INDEXED: Mapping[str, Any] = {"index_n_heads": 16, "index_head_dim": 12, "index_topk": 6}
"""Fewer keys than the sequences of the tests have."""
GLM4_MOE: Mapping[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "num_nextn_predict_layers": 0,
}
LONGROPE: Mapping[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.5, 2.0, 5.0],
}
PHI: Mapping[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
GPT_NEOX: Mapping[str, Any] = {
    "num_key_value_heads": ...,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}
GPT2: Mapping[str, Any] = {
    "num_key_value_heads": ...,
    "intermediate_size": ...,
    "max_position_embeddings": ...,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}


WINDOWS: Mapping[str, Any] = {"sliding_window": 6}
"""Short beside the sequences of the tests, so that logits depend on it."""
QWEN_WINDOWS: Mapping[str, Any] = {**WINDOWS, "use_sliding_window": True, "max_window_layers": 1}
GEMMA: Mapping[str, Any] = {**WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 20, "num_hidden_layers": 4}


GEMMA4: Mapping[str, Any] = {
    **WINDOWS,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA4_SMALL: Mapping[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [*GEMMA4["layer_types"], "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
}
"""Further keys, as of E2B."""


GRANITE: Mapping[str, Any] = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 7.0,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
}
GRANITE4: Mapping[str, Any] = {
    **GRANITE,
    "mlp_bias": ...,
    "attention_bias": False,
    "logits_scaling": 2.0,
    "intermediate_size": 24,
    "shared_intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 4,
    "mamba_d_state": 6,
    "mamba_d_head": 16,
    "position_embedding_type": "nope",
}
FALCON_H1: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "mamba_n_heads": 4,
    "mamba_d_ssm": 40,
    "mamba_d_head": 10,
    "mamba_d_state": 6,
    "mamba_norm_before_gate": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e11},
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9375,
    "embedding_multiplier": 5.656854249492381,
    "key_multiplier": 0.55,
    "lm_head_multiplier": 0.39,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.36, 0.5, 0.7],
    "ssm_out_multiplier": 0.23570226039551587,
}
NEMOTRON_H: Mapping[str, Any] = {
    "num_hidden_layers": ...,
    "hybrid_override_pattern": "M-M*-",
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 10,
    "ssm_state_size": 6,
    "n_groups": 2,
    "use_bias": True,
    "mlp_bias": True,
    "time_step_min": 0.7,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""With steps of which the bound changes many."""
YARN_OF_OLMO3: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.2,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LONG_OLMO3: Mapping[str, Any] = {
    "full_attention": YARN_OF_OLMO3,
    "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
}
LONG_GEMMA3: Mapping[str, Any] = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


GPT_OSS: Mapping[str, Any] = {
    **WINDOWS,
    "intermediate_size": 64,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "swiglu_limit": 0.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
}
"""With a limit that many of the random numbers exceed, and widths that blocks of 32 divide."""


SPECIAL: Mapping[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""Within the vocabulary, where a class has larger ones by default."""

MIMO: Mapping[str, Any] = {
    **SPECIAL,
    "head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": 5,
    "attention_value_scale": 0.6,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.334},
    },
}


GROWING: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 24.0,
    "beta_slow": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
"""With steps that sequences of the tests go beyond."""
UNSTRETCHED = {key: GROWING[key] for key in ("rope_theta", "original_max_position_embeddings", "llama_4_scaling_beta")}
LLAMA4: Mapping[str, Any] = {
    **SPECIAL,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "attention_chunk_size": 7,
    "floor_scale": 5,
    "attn_scale": 0.5,
}
"""With chunks and steps that sequences of the tests go beyond."""
DOTS1: Mapping[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
}
FULL = ["full_attention"]
ERNIE_MOE: Mapping[str, Any] = {"moe_intermediate_size": 16, "moe_num_experts": 8, "moe_k": 2}
HALF_ROTATED: Mapping[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
}


@torch.no_grad()
def randomised(model: Any) -> Any:
    """Returns the model, for evaluation, with noise on all parameters, norms too, and on the biases of routers."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):
            buffer.normal_(std=0.1)
        elif name.endswith("layer_scalar"):
            buffer.normal_(mean=1.0, std=0.1)
    return model.eval()


@frozen
class Published:
    """A class of `transformers`, and the keys of its configuration beside `SIZES`; `...`: it has no such key."""

    name: str
    """`Llama` of `LlamaForCausalLM`."""
    keys: Mapping[str, Any] = attrs.field(factory=dict)
    config: str = ""
    """The name of the configuration's class, where it is another."""
    head: str = "ForCausalLM"
    """The end of the class's name."""

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        """Returns a model whose parameters and buffers, norms and biases too, are random."""
        keys = {key: value for key, value in {**SIZES, **self.keys}.items() if value is not ...}
        config = getattr(transformers, f"{self.config or self.name}Config")(**keys)
        torch.manual_seed(0)
        return randomised(getattr(transformers, f"{self.name}{self.head}")(config)).to(dtype)

    def write(self, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        """Write the model to a folder, in several files; returns it."""
        model = self.model(dtype)
        model.save_pretrained(folder, max_shard_size="40KB")
        return model


class Stacked(Published):
    """All experts of a layer are one tensor in published files, which `transformers` reads and does not write."""

    def write(self, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        """Write it with experts in stacks; returns the model."""
        model = super().write(folder, dtype)
        stack_experts(folder)
        return model


def stack_experts(folder: Path) -> None:
    """Write the tensors of a folder once more, with the experts of a layer in stacks."""
    rewrite(folder, stacked)


def rewrite(folder: Path, change: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]) -> None:
    """Write the tensors of a folder once more, as a function changes them."""
    paths = sorted(folder.glob("*.safetensors"))
    tensors = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    for path in (*paths, folder / "model.safetensors.index.json"):
        path.unlink()
    save_file(change(tensors), folder / "model.safetensors", {"format": "pt"})


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors with the matrices of a layer's experts in two stacks."""
    apart: dict[str, dict[tuple[int, str], Tensor]] = {}
    whole = {}
    for name, tensor in tensors.items():
        layer, found, rest = name.partition(".experts.")
        if not found:
            whole[name] = tensor
            continue
        number, matrix, _ = rest.split(".")
        apart.setdefault(f"{layer}.experts", {})[int(number), matrix] = tensor
    for name, own in apart.items():
        numbers = sorted({number for number, _ in own})
        both = [torch.cat([own[number, "gate_proj"], own[number, "up_proj"]]) for number in numbers]
        whole[f"{name}.gate_up_proj"] = torch.stack(both)
        whole[f"{name}.down_proj"] = torch.stack([own[number, "down_proj"] for number in numbers])
    return whole


class NamedApart(Published):
    """Dense layers of published files have names other than those with experts, where `transformers` writes one."""

    def write(self, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        """Write it with the name of published files; returns the model."""
        model = super().write(folder, dtype)
        rewrite(folder, lambda tensors: {DENSE.sub(".mlp", name): tensors[name] for name in tensors})
        return model


DENSE = re.compile(r"\.block_sparse_moe(?=\.(?:gate|up|down)_proj)")
MODELS: Mapping[str, Published] = {
    "llama": Published("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "llama, tied": Published("Llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "llama, dynamic": Published("Llama", {"max_position_embeddings": 16, "rope_parameters": DYNAMIC}),
    "mistral": Published("Mistral", {"sliding_window": None}),
    "mistral, window": Published("Mistral", WINDOWS),
    "qwen2": Published("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": Published("Qwen3", {"head_dim": 16}),
    "qwen3, window": Published("Qwen3", {"head_dim": 16, **QWEN_WINDOWS}),
    "olmo2": Published("Olmo2"),
    "olmo3": Published("Olmo3", {**WINDOWS, "num_hidden_layers": 4, "rope_parameters": LONG_OLMO3}),
    "granite": Published("Granite", GRANITE),
    "smollm3": Published("SmolLM3", {"num_hidden_layers": 5, **SPECIAL}),
    "smollm3, window": Published(
        "SmolLM3", {**WINDOWS, "use_sliding_window": True, "no_rope_layers": [1, 0, 1], **SPECIAL}
    ),
    "gemma": Published("Gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": Published("Gemma2", {**GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}),
    "gemma3_text": Published(
        "Gemma3", {**GEMMA, "sliding_window_pattern": 3, "rope_parameters": LONG_GEMMA3}, "Gemma3Text"
    ),
    "gemma3n_text": Published(
        "Gemma3n",
        {
            **WINDOWS,
            **SPECIAL,
            "head_dim": 8,
            "num_hidden_layers": 5,
            "intermediate_size": [48, 48, 40, 48, 48],
            "activation_sparsity_pattern": [0.9, 0.7, 0.0, 0.0, 0.0],
            "layer_types": [*("sliding_attention", "full_attention") * 2, "full_attention"],
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 60,
            "laurel_rank": 4,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "final_logit_softcapping": 2.0,
        },
        "Gemma3nText",
    ),
    "gemma4_text": Published(
        "Gemma4",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "final_logit_softcapping": 2.0,
        },
        "Gemma4Text",
    ),
    "gemma4_text, small": Published(
        "Gemma4",
        {**GEMMA4, **GEMMA4_SMALL},
        "Gemma4Text",
    ),
    "gemma4_text, experts": Published(
        "Gemma4",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
        "Gemma4Text",
    ),
    "gemma4_text, own values": Published("Gemma4", {**GEMMA4, "attention_bias": True}, "Gemma4Text"),
    "llama4_text": Published("Llama4", LLAMA4, "Llama4Text"),
    "llama4_text, dense layers": Published(
        "Llama4",
        {
            **LLAMA4,
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 2,
            "use_qk_norm": False,
            "attention_bias": True,
            "no_rope_layers": [1, 0, 0, 1],
            "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0},
        },
        "Llama4Text",
    ),
    "mixtral": Published("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOWS}),
    "qwen2_moe": Published("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen2_moe, window": Published("Qwen2Moe", {**EXPERTS, **QWEN_WINDOWS, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": Published("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 2, "head_dim": 8}),
    "gpt_oss": Published("GptOss", GPT_OSS),
    "deepseek_v3": Published("DeepseekV3", {**LATENT, "rope_parameters": YARN}),
    "deepseek_v32": Published("DeepseekV32", {**LATENT, **INDEXED, "rope_parameters": YARN}),
    "glm_moe_dsa": Published("GlmMoeDsa", {**LATENT, **INDEXED, **SPECIAL, "n_group": 1}),
    "qwen3_next": Published("Qwen3Next", QWEN3_NEXT),
    "qwen3_5_text": Published("Qwen3_5", {**QWEN3_5, "tie_word_embeddings": True}, "Qwen3_5Text"),
    "qwen3_5_moe_text": Stacked(
        "Qwen3_5Moe",
        {**QWEN3_5, **EXPERTS, "intermediate_size": ..., "shared_expert_intermediate_size": 32},
        "Qwen3_5MoeText",
    ),
    "kimi_linear": NamedApart("KimiLinear", {**KIMI_LINEAR, **SPECIAL}),
    "kimi_linear, groups": NamedApart(
        "KimiLinear", {**KIMI_LINEAR, **SPECIAL, "q_lora_rank": 24, "num_expert_group": 2, "moe_renormalize": False}
    ),
    "lfm2": Published("Lfm2", {**LFM2, **SPECIAL}),
    "lfm2_moe": Published("Lfm2Moe", {**LFM2_MOE, **SPECIAL, "routed_scaling_factor": 1.5}),
    "lfm2_moe, not normalised": Published(
        "Lfm2Moe", {**LFM2_MOE, **SPECIAL, "norm_topk_prob": False, "tie_word_embeddings": False}
    ),
    "lfm2, untied": Published("Lfm2", {**SPECIAL, "full_attn_idxs": [0, 2], "tie_word_embeddings": False}),
    "glm4_moe": Published("Glm4Moe", {**GLM4_MOE, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe, without norms": Published("Glm4Moe", {**GLM4_MOE, "n_group": 2, "topk_group": 1, "head_dim": 16}),
    "mimo_v2_flash": Published("MiMoV2Flash", MIMO),
    "mimo_v2_flash, groups": Published(
        "MiMoV2Flash",
        {
            **MIMO,
            "attention_bias": True,
            "attention_value_scale": None,
            "n_group": 2,
            "norm_topk_prob": False,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "dense", "sparse"],
            "rope_parameters": ...,
        },
    ),
    "glm": Published("Glm", {**SPECIAL, **HALF_ROTATED, "head_dim": 16}),
    "olmoe": Published("Olmoe", {**SPECIAL, "num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": None}),
    "glm4": Published("Glm4", {**SPECIAL, **HALF_ROTATED, "head_dim": 16}),
    "glm4, tied": Published("Glm4", {**SPECIAL, "head_dim": 8, "tie_word_embeddings": True, "attention_bias": False}),
    "exaone4": Published("Exaone4", {**WINDOWS, **SPECIAL, "num_hidden_layers": 4, "rope_parameters": LLAMA3}),
    "exaone4, without windows": Published(
        "Exaone4",
        {**SPECIAL, "sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True},
    ),
    "ministral": Published("Ministral", {**WINDOWS, "head_dim": 16, "layer_types": ["sliding_attention"] + FULL * 2}),
    "ministral3": Published("Ministral3", {**SPECIAL, "head_dim": 16, "rope_parameters": GROWING}),
    "ministral3, window": Published(
        "Ministral3",
        {**SPECIAL, **WINDOWS, "head_dim": 16, "rope_parameters": {**UNSTRETCHED, "rope_type": "default"}},
    ),
    "arcee": Published("Arcee", {**SPECIAL, "attention_bias": True, "mlp_bias": True}),
    "nemotron": Published("Nemotron", {**SPECIAL, **HALF_ROTATED, "mlp_bias": True, "attention_bias": True}),
    "nemotron, tied": Published("Nemotron", {**SPECIAL, "tie_word_embeddings": True, "head_dim": 16}),
    "apertus": Published("Apertus", {**SPECIAL, "head_dim": 16, "attention_bias": True, "rope_parameters": LLAMA3}),
    "apertus, tied": Published("Apertus", {**SPECIAL, "tie_word_embeddings": True}),
    "helium": Published("Helium", {**SPECIAL, "head_dim": 8, "attention_bias": True}),
    "ernie4_5": Published("Ernie4_5", {**SPECIAL, "head_dim": 16, "use_bias": True}),
    "ernie4_5_moe": Published("Ernie4_5_Moe", {**SPECIAL, **ERNIE_MOE}),
    "dots1": Published("Dots1", {**SPECIAL, **DOTS1, "attention_bias": True, "norm_topk_prob": True}),
    "dots1, window": Published("Dots1", {**SPECIAL, **DOTS1, **WINDOWS, "max_window_layers": 1, "n_shared_experts": 2}),
    "hunyuan_v1_dense": Published("HunYuanDenseV1", {**SPECIAL, "head_dim": 16, "tie_word_embeddings": True}),
    "seed_oss": Published("SeedOss", {**SPECIAL, "head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "starcoder2": Published("Starcoder2", {**WINDOWS, **SPECIAL}),
    "starcoder2, untied": Published("Starcoder2", {**SPECIAL, "use_bias": False, "tie_word_embeddings": False}),
    "bamba": Published(
        "Bamba",
        {
            **SPECIAL,
            "attn_layer_indices": [1],
            "mamba_n_heads": 4,
            "mamba_d_state": 6,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "time_step_limit": [0.05, 0.6],
        },
    ),
    "falcon_h1": Published("FalconH1", FALCON_H1),
    "falcon_h1, norm": Published(
        "FalconH1",
        {
            **FALCON_H1,
            "mamba_rms_norm": True,
            "mamba_n_groups": 2,
            "mamba_d_head": "auto",
            "time_step_limit": [0.05, 0.6],
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "mlp_bias": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 16,
        },
    ),
    "nemotron_h": Published("NemotronH", NEMOTRON_H),
    "nemotron_h, experts": Published(
        "NemotronH",
        {
            **NEMOTRON_H,
            "layers_block_type": ["mamba", "moe", "attention", "moe", "mlp"],
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 32,
            "n_routed_experts": 8,
            "n_group": 2,
            "routed_scaling_factor": 2.5,
            "mlp_bias": False,
            "n_groups": 1,
            "use_conv_bias": False,
        },
    ),
    "granitemoehybrid": Published("GraniteMoeHybrid", GRANITE4),
    "granitemoehybrid, dense": Published(
        "GraniteMoeHybrid",
        {
            **GRANITE4,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "attention_bias": True,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "mamba_n_groups": 2,
            "position_embedding_type": "rope",
            "tie_word_embeddings": False,
        },
    ),
    "granitemoe": Published(
        "GraniteMoe",
        {**GRANITE, "mlp_bias": ..., "logits_scaling": 2.0, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "minimax_m2": Published(
        "MiniMaxM2", {**SPECIAL, **HALF_ROTATED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "phi": Published("Phi", {**SPECIAL, **HALF_ROTATED, "num_key_value_heads": 4, "resid_pdrop": 0.0}),
    "phi, tied": Published("Phi", {**SPECIAL, "tie_word_embeddings": True, "hidden_act": "gelu"}),
    "cohere": Published("Cohere", {**SPECIAL, "logit_scale": 0.3, "rope_parameters": LLAMA3}),
    "cohere, untied": Published(
        "Cohere",
        {
            **SPECIAL,
            "logit_scale": 1.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "head_dim": 16,
            "use_qk_norm": True,
        },
    ),
    "cohere2": Published("Cohere2", {**WINDOWS, **SPECIAL, "logit_scale": 0.5, "num_hidden_layers": 5}),
    "cohere2, listed": Published(
        "Cohere2",
        {
            **WINDOWS,
            **SPECIAL,
            "logit_scale": 1.0,
            "layer_types": [*FULL, "sliding_attention", *FULL],
            "attention_bias": True,
        },
    ),
    "phi3": Published("Phi3", {**PHI, "sliding_window": 12}),
    "phi3, longrope": Published("Phi3", {**PHI, "rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
    "gpt_neox": Published("GPTNeoX", GPT_NEOX),
    "gpt_neox, sequential": Published(
        "GPTNeoX",
        {
            **GPT_NEOX,
            "use_parallel_residual": False,
            "hidden_act": "gelu_new",
            "attention_bias": False,
            "hidden_dropout": 0.0,
        },
    ),
    "gpt2": Published("GPT2", GPT2, head="LMHeadModel"),
    "gpt2, untied": Published("GPT2", {**GPT2, "tie_word_embeddings": False, "n_inner": 40}, head="LMHeadModel"),
}


def ours(run: Path, precision: str = "fp32") -> nn.Module:
    """Returns the model of a run folder, in evaluation mode."""
    catalog = Catalog.installed()
    checkpoint, manifest = locate(run, "full")
    job = parse_job(manifest["job"], "manifest.json", catalog)
    job = attrs.evolve(job, train=attrs.evolve(job.train, precision=precision))
    context = build_context(job, catalog, run)
    model: Any = build_model(job, context).model
    load_model(checkpoint, model)
    return model.eval()


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    """Returns the logits of Forge's model."""
    return model.head.logits(model({"input_ids": ids}))


@contextmanager
def lifted() -> Iterator[None]:
    """Where the code of `transformers` names float32 whatever its dtype, or none, it gets float64."""
    default = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        torch.set_default_dtype(torch.float64)
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def wide_logits(published: Any, ids: Tensor) -> Tensor:
    """Returns the logits of a published model, all of it computed in float64."""
    with torch.no_grad(), lifted():
        config = copy.deepcopy(published.config)
        config.dtype = None  # which a class may build parts in
        model = type(published)(config).double()  # its tables of positions, too
        model.set_experts_implementation("eager")  # others have no kernel for float64
        model.load_state_dict(published.state_dict())
        return model.eval()(ids).logits


def ids_of(seed: int = 0, length: int = 24) -> Tensor:
    """Returns two rows of tokens."""
    return torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))
