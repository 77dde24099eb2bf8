"""Windows, patterns, sinks, scales and caps give what transformers gives with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    GptOssConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from forge_plugin_transformer import (
    AttentionPattern,
    GroupedQueryAttention,
    InitStd,
    PlainRope,
    RMSNorm,
    SwiGLU,
)
from forge_plugin_transformer.huggingface_names import from_huggingface

LENGTH, WINDOW, THETA = 40, 7, 1e4
ROPE = {"rope_type": "default", "rope_theta": THETA}
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "rope_parameters": ROPE,
    "attn_implementation": "eager",
    "rms_norm_eps": 1e-6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
OURS: dict[str, Any] = {"heads": 6, "kv_heads": 2, "head_dim": 8, "rope": PlainRope(theta=THETA)}
KEYS = {"dim": 48, "layers": 4, "vocab_size": 101, "ffn": SwiGLU(hidden=80), "norm": RMSNorm(eps=1e-6)}
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}
MODULES = (modeling_gemma2, modeling_gpt_oss, modeling_mistral, modeling_qwen2, modeling_qwen3)


class WideTorch:
    """torch with float64 in place of float32, for the places where transformers computes in the latter."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    if request.param == torch.float64:
        for module in MODULES:
            monkeypatch.setattr(module, "torch", WideTorch())
        monkeypatch.setattr(Tensor, "float", Tensor.double)
        torch.set_default_dtype(torch.float64)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(101, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def randomised(model: Any) -> Any:
    """The model with random norms and biases."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            low = -0.5 if name.endswith("bias") else 0.5
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator).to(parameter.dtype) + low)
    return model.eval()


def with_weights_of(reference: Any, model: Any) -> Any:
    theirs, ours = dict(reference.named_parameters()), dict(model.named_parameters())
    assert {from_huggingface(name) for name in theirs} == set(ours)
    for name, parameter in theirs.items():
        ours[from_huggingface(name)].data.copy_(parameter)
    return model.eval().requires_grad_(False)


MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]


def mistral() -> Any:
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW))


def qwen2() -> Any:
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    keys = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **keys, tie_word_embeddings=False))


def qwen3() -> Any:
    keys = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED}
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **keys, tie_word_embeddings=False))


def pattern(**keys: Any) -> AttentionPattern:
    kinds = {
        "near": GroupedQueryAttention(**OURS, **keys, window=WINDOW),
        "full": GroupedQueryAttention(**OURS, **keys),
    }
    return AttentionPattern(layers=("near", "near", "full"), kinds=kinds)


MODELS = {
    "mistral": (mistral, lambda **keys: GroupedQueryAttention(**OURS, **keys, window=WINDOW)),
    "qwen2": (qwen2, lambda **keys: pattern(bias=True, output_bias=False, **keys)),
    "qwen3": (qwen3, lambda **keys: pattern(qk_norm=True, **keys)),
}


@pytest.mark.parametrize("backend", ["flash", "math", "gemm"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal(make_model: Callable[..., Any], ids: Tensor, name: str, backend: str, dtype: torch.dtype) -> None:
    theirs, ours = MODELS[name]
    torch.manual_seed(0)
    reference = randomised(theirs())
    if name == "qwen2":  # whose width of a head follows from the others
        assert reference.config.hidden_size // reference.config.num_attention_heads == OURS["head_dim"]
    model = with_weights_of(reference, make_model(attention=ours(backend=backend), dtype=dtype, **KEYS))
    with torch.no_grad():
        expected = reference(ids).logits
        found = model.head.logits(model({"input_ids": ids}))
    assert expected.std() > 0.1
    assert (found - expected).abs().max() < TOLERANCES[dtype]


def test_another_window_would_not_pass(make_model: Callable[..., Any], ids: Tensor) -> None:
    torch.manual_seed(0)
    reference = randomised(mistral())
    for window in (WINDOW - 1, WINDOW + 1):
        attention = GroupedQueryAttention(**OURS, window=window)
        model = with_weights_of(reference, make_model(attention=attention, **KEYS))
        with torch.no_grad():
            difference = model.head.logits(model({"input_ids": ids})) - reference(ids).logits
        assert difference.abs().max() > 1e-2


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_far_beyond_the_window(
    make_model: Callable[..., Any], ids: Tensor, name: str, dtype: torch.dtype
) -> None:
    """Each with its own cache."""
    theirs, ours = MODELS[name]
    torch.manual_seed(0)
    reference = randomised(theirs())
    model = with_weights_of(reference, make_model(attention=ours(), dtype=dtype, **KEYS))
    prompt = ids[:, :5]
    expected = reference.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    cache, tokens = model.new_cache(2, 40), prompt
    step = prompt
    for _ in range(30):
        step = model.head.logits(model.decode({"input_ids": step}, cache)[:, -1:]).argmax(-1)
        tokens = torch.cat([tokens, step], 1)
    assert torch.equal(tokens, expected)


# --- parts ------------------------------------------------------------------------------------------------------------


def mask_of(window: int) -> Tensor:
    """transformers' own, to be added to scores."""
    sees = sliding_window_causal_mask_function(window)
    index = torch.arange(LENGTH)
    allowed = sees(0, 0, index[:, None], index[None, :])
    return torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(~allowed, torch.finfo(torch.float32).min)


def part_difference(attention: Any, rotary: Any, ours: Any, window: int, dtype: torch.dtype) -> tuple[float, float]:
    """Largest differences of results and of gradients of all parameters, relative to the largest of each."""
    for name, parameter in attention.named_parameters():
        name = name.replace("_proj", "").replace("sinks", "sinks.weight")
        ours.get_parameter(name).data.copy_(parameter)
    x = torch.randn(2, LENGTH, 48, generator=torch.Generator().manual_seed(5), dtype=dtype)
    tables = rotary(x, torch.arange(LENGTH)[None])
    expected, _ = attention(x, position_embeddings=tables, attention_mask=mask_of(window))
    found = ours(x, {})
    results = (found - expected).abs().max().item() / expected.abs().max().item()
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(6), dtype=dtype)
    for out in (found, expected):
        (out * weights).sum().backward()
    pairs = [
        (ours.get_parameter(name.replace("_proj", "").replace("sinks", "sinks.weight")).grad, parameter.grad)
        for name, parameter in attention.named_parameters()
    ]
    assert all(theirs.abs().max() > 1e-3 for _, theirs in pairs)
    return results, max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


@pytest.mark.parametrize("backend", ["flash", "math", "gemm"])
@pytest.mark.parametrize("window", [0, WINDOW], ids=["full", "window"])
def test_gpt_oss_attention(make_part: Callable[..., Any], backend: str, window: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = GptOssConfig(**SIZES, layer_types=MIXED, sliding_window=WINDOW, num_local_experts=2)
    reference = modeling_gpt_oss.GptOssAttention(config, 0 if window else 2)
    for parameter in reference.parameters():
        parameter.data.normal_(0.0, 0.3 if parameter.ndim > 1 else 1.0)
    component = GroupedQueryAttention(**OURS, bias=True, sinks=True, window=window, backend=backend)
    ours = make_part(component, dtype=dtype, dim=48, init=InitStd(0.2, 0.2))
    rotary = modeling_gpt_oss.GptOssRotaryEmbedding(config)
    differences = part_difference(reference, rotary, ours, window or LENGTH, dtype)
    assert max(differences) < TOLERANCES[dtype]


@pytest.mark.parametrize("backend", ["math", "gemm"])
@pytest.mark.parametrize("window", [0, WINDOW], ids=["full", "window"])
def test_gemma2_attention(make_part: Callable[..., Any], backend: str, window: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    keys = {"query_pre_attn_scalar": 3, "attn_logit_softcapping": 2.0, "sliding_window": WINDOW, "layer_types": MIXED}
    config = Gemma2Config(**SIZES, **keys)
    reference = modeling_gemma2.Gemma2Attention(config, 0 if window else 2).eval()
    for parameter in reference.parameters():
        parameter.data.normal_(0.0, 0.3)
    component = GroupedQueryAttention(**OURS, scale=3**-0.5, soft_cap=2.0, window=window, backend=backend)
    ours = make_part(component, dtype=dtype, dim=48, init=InitStd(0.2, 0.2))
    rotary = modeling_gemma2.Gemma2RotaryEmbedding(config)
    differences = part_difference(reference, rotary, ours, window or LENGTH, dtype)
    assert max(differences) < TOLERANCES[dtype]
