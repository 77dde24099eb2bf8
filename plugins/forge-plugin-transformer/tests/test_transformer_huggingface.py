"""Logits equal those of the reference implementations with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from forge_plugin_transformer import (
    GroupedQueryAttention,
    LinearRope,
    Llama3Rope,
    PlainRope,
    RMSNorm,
    SwiGLU,
    YarnRope,
)
from forge_plugin_transformer.huggingface_names import from_huggingface, to_huggingface
from forge_testing.refusals import naming

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LENGTH = 96
"""Long enough for the stretched encodings below to differ from the plain one."""


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(101, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def max_difference(reference: Any, model: Any, ids: Tensor) -> float:
    """Of the logits, once the reference's parameters are the model's."""
    theirs = {name: parameter.data for name, parameter in reference.named_parameters()}
    ours = dict(model.named_parameters())
    assert {from_huggingface(name) for name in theirs} == set(ours)
    for name, parameter in theirs.items():
        ours[from_huggingface(name)].data.copy_(parameter)
    with torch.no_grad():
        expected = reference.eval()(ids).logits
        assert expected.std() > 0.1
        return (model.head.logits(model({"input_ids": ids})) - expected).abs().max().item()


def llama(rope: dict[str, Any], tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    config = LlamaConfig(**SIZES, **heads, rope_parameters=rope, tie_word_embeddings=tied, rms_norm_eps=1e-5)
    return LlamaForCausalLM(config)


ROPES = {
    "plain": (PlainRope(theta=5e3), {"rope_type": "default", "rope_theta": 5e3}),
    "linear": (LinearRope(factor=3.0), {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}),
    "llama3": (
        Llama3Rope(theta=1e4, factor=8.0, original_max_position_embeddings=64),
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn": (
        YarnRope(factor=4.0, original_max_position_embeddings=64),
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "yarn with every key": (
        YarnRope(
            theta=2e4,
            factor=6.0,
            original_max_position_embeddings=40,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=0.7,
            mscale_all_dim=1.1,
        ),
        {
            "rope_type": "yarn",
            "rope_theta": 2e4,
            "factor": 6.0,
            "original_max_position_embeddings": 40,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.1,
        },
    ),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ROPES)
def test_logits_equal_llama(make_model: Callable[..., Any], ids: Tensor, name: str, tied: bool) -> None:
    rope, parameters = ROPES[name]
    attention = GroupedQueryAttention(heads=6, kv_heads=2, rope=rope)
    keys = {"dim": 48, "layers": 3, "vocab_size": 101, "ffn": SwiGLU(hidden=80)}
    model = make_model(attention=attention, tie_embeddings=tied, **keys)
    assert max_difference(llama(parameters, tied), model, ids) < 1e-4


def test_another_scaling_would_not_pass(make_model: Callable[..., Any], ids: Tensor) -> None:
    attention = GroupedQueryAttention(heads=6, kv_heads=2, rope=ROPES["linear"][0])
    model = make_model(attention=attention, dim=48, layers=3, vocab_size=101, ffn=SwiGLU(hidden=80))
    assert max_difference(llama(ROPES["llama3"][1], tied=False), model, ids) > 1e-2


def test_logits_equal_qwen3(make_model: Callable[..., Any], ids: Tensor) -> None:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    reference = Qwen3ForCausalLM(Qwen3Config(**SIZES, **heads, rope_parameters=rope, rms_norm_eps=1e-6))
    for parameter in reference.parameters():
        if parameter.ndim == 1:
            parameter.data.uniform_(0.5, 1.5)
    attention = GroupedQueryAttention(heads=4, kv_heads=2, head_dim=20, qk_norm=True, rope=PlainRope(theta=1e6))
    keys = {"dim": 48, "layers": 3, "vocab_size": 101, "ffn": SwiGLU(hidden=80)}
    model = make_model(attention=attention, norm=RMSNorm(eps=1e-6), **keys)
    assert max_difference(reference, model, ids) < 1e-4


def test_names_map_both_ways(make_model: Callable[..., Any]) -> None:
    attention = GroupedQueryAttention(heads=4, kv_heads=2, qk_norm=True, bias=True)
    names = [name for name, _ in make_model(attention=attention, layers=11).named_parameters()]
    assert [from_huggingface(to_huggingface(name)) for name in names] == names
    assert to_huggingface("layers.10.attention.q.bias") == "model.layers.10.self_attn.q_proj.bias"


def test_modules_of_multi_token_prediction_are_the_layers_after_the_models() -> None:
    name = "mtp.blocks.1.attention.q.weight"
    assert to_huggingface(name, layers=61) == "model.layers.62.self_attn.q_proj.weight"
    assert from_huggingface("model.layers.62.self_attn.q_proj.weight", layers=61) == name
    with pytest.raises(KeyError, match=naming("number of layers")):
        to_huggingface(name)
    with pytest.raises(KeyError, match="no counterpart"):
        to_huggingface("layers.0.projection.weight", layers=61)


@pytest.mark.parametrize("name", ["layers.0.ffn.experts.w1", "norm.gain", "head.lora.weight", "layers.0.head.weight"])
def test_a_name_without_counterpart_is_refused(name: str) -> None:
    with pytest.raises(KeyError, match="no counterpart"):
        to_huggingface(name)
