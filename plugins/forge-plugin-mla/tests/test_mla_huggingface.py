"""The same weights give what transformers' DeepSeek-V3 gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from forge_plugin_mla import MultiHeadLatentAttention
from forge_plugin_mla.huggingface_names import PARTS, from_huggingface, to_huggingface
from forge_plugin_transformer import PlainRope, RMSNorm, SwiGLU, YarnRope

MakeModel = Callable[..., Any]
WIDTHS = {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
YARN = {
    "factor": 6.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 16.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
ROPES = {
    "plain": (PlainRope(theta=5e3), {"rope_type": "default", "rope_theta": 5e3}),
    "yarn": (YarnRope(theta=1e4, **YARN), {"rope_type": "yarn", "rope_theta": 1e4, **YARN}),
}
CASES = [
    ("plain", True, 14),
    ("yarn", True, 14),
    ("yarn", False, 0),
]
LENGTH = 64
"""Beyond the length that the stretched encoding starts from."""


def reference(rope: str, interleave: bool, q_lora_rank: int) -> DeepseekV3ForCausalLM:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=32, intermediate_size=56, num_hidden_layers=3, first_k_dense_replace=3, vocab_size=61,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=96, initializer_range=0.2,
        rms_norm_eps=1e-6, tie_word_embeddings=False, rope_interleave=interleave, q_lora_rank=q_lora_rank or None,
        rope_parameters=ROPES[rope][1], attn_implementation="eager", **WIDTHS,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5)
    return model


def ours(make_model: MakeModel, rope: str, interleave: bool, q_lora_rank: int) -> Any:
    attention = MultiHeadLatentAttention(
        heads=4, q_lora_rank=q_lora_rank, rope=ROPES[rope][0], rope_interleave=interleave, **WIDTHS
    )
    return make_model(attention, layers=3, norm=RMSNorm(eps=1e-6), ffn=SwiGLU(hidden=56))


def with_weights_of(model: Any, theirs: DeepseekV3ForCausalLM) -> Any:
    named, parameters = dict(theirs.named_parameters()), dict(model.named_parameters())
    assert {from_huggingface(name) for name in named} == set(parameters)
    for name, parameter in named.items():
        parameters[from_huggingface(name)].copy_(parameter)
    return model


@pytest.fixture
def long_ids() -> Tensor:
    return torch.randint(61, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("rope", "interleave", "q_lora_rank"), CASES)
def test_logits_equal_deepseek(
    make_model: MakeModel, long_ids: Tensor, rope: str, interleave: bool, q_lora_rank: int
) -> None:
    theirs = reference(rope, interleave, q_lora_rank)
    model = with_weights_of(ours(make_model, rope, interleave, q_lora_rank), theirs)
    expected = theirs(long_ids).logits
    assert expected.std() > 0.1
    assert (model.head.logits(model({"input_ids": long_ids})) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("rope", "interleave", "q_lora_rank"), CASES)
def test_attention_equals_deepseeks(make_model: MakeModel, rope: str, interleave: bool, q_lora_rank: int) -> None:
    theirs = reference(rope, interleave, q_lora_rank)
    attention = with_weights_of(ours(make_model, rope, interleave, q_lora_rank), theirs).layers["0"].attention
    module: DeepseekV3Attention = theirs.model.layers[0].self_attn
    x = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(2))
    turns = DeepseekV3RotaryEmbedding(theirs.config)(x, torch.arange(LENGTH)[None])
    mask = torch.full((LENGTH, LENGTH), -torch.inf).triu_(1)[None, None]
    expected = module(x, turns, mask)[0]
    assert expected.std() > 0.1
    assert (attention(x, {}) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("other", [("plain", True, 14), ("yarn", False, 14)])
def test_another_encoding_would_not_pass(make_model: MakeModel, long_ids: Tensor, other: tuple) -> None:
    theirs = reference("yarn", True, 14)
    model = with_weights_of(ours(make_model, *other), theirs)
    assert (model.head.logits(model({"input_ids": long_ids})) - theirs(long_ids).logits).abs().max() > 1e-2


def test_decoding_with_both_caches_goes_the_same_way(make_model: MakeModel, long_ids: Tensor) -> None:
    theirs = reference("yarn", True, 14)
    model = with_weights_of(ours(make_model, "yarn", True, 14), theirs)
    cache, past = model.new_cache(2, LENGTH), None
    for piece in long_ids[:, :12].split([9, 1, 1, 1], 1):
        output = theirs(piece, past_key_values=past, use_cache=True)
        past = output.past_key_values
        logits = model.head.logits(model.decode({"input_ids": piece}, cache))
        assert (logits - output.logits).abs().max() < 1e-4


@pytest.mark.parametrize("q_lora_rank", [0, 8])
def test_names_map_both_ways(make_model: MakeModel, q_lora_rank: int) -> None:
    names = [name for name, _ in make_model(MultiHeadLatentAttention(q_lora_rank=q_lora_rank)).named_parameters()]
    assert [from_huggingface(to_huggingface(name)) for name in names] == names
    assert len(set(PARTS.values())) == len(PARTS)


def test_a_name_without_counterpart_is_refused() -> None:
    with pytest.raises(KeyError, match="no counterpart"):
        from_huggingface("model.layers.3.mlp.gate.weight")
    with pytest.raises(KeyError, match="no counterpart"):
        to_huggingface("layers.0.attention.k.weight")
