"""What is read inside equals what `transformers` returns of itself, with its weights.

In float64 everything that `transformers` computes in float32 (norms, rotary tables, the softmax) is lifted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from forge_plugin_moe import MoE, SoftmaxTopK
from forge_plugin_moe.huggingface_names import from_huggingface
from forge_plugin_taps.lens import attention_maps, logit_lens, read_points
from forge_plugin_transformer import GroupedQueryAttention, PlainRope, RMSNorm, SwiGLU, Transformer
from forge_testing.runs import tiny_run

LAYERS, LENGTH = 4, 48
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": LAYERS, "vocab_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "attn_implementation": "eager", "experts_implementation": "eager",
}  # fmt: skip
EXPERTS = MoE(experts=8, hidden=24, router=SoftmaxTopK(top_k=2))
MODELS: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, intermediate_size=80), False, SwiGLU(hidden=80)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, intermediate_size=80), True, SwiGLU(hidden=80)),
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig(**SIZES, intermediate_size=24, num_local_experts=8, sliding_window=None),
        False,
        EXPERTS,
    ),
    "qwen3 moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True),
        True,
        EXPERTS,
    ),
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


def reference(name: str, dtype: torch.dtype, ids: Tensor) -> tuple[Any, Any]:
    """Returns the model of `transformers`, and all that it returns."""
    kind, config, *_ = MODELS[name]
    torch.manual_seed(0)
    with computing_in(dtype), torch.no_grad():
        model = kind(config).eval()
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
        routed = {"output_router_logits": True} if "num_experts_per_tok" in config.to_dict() else {}
        return model, model(ids, output_hidden_states=True, output_attentions=True, **routed)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-9), ("fp32", 1e-3)])
@pytest.mark.parametrize("name", MODELS)
def test_points_maps_and_lens_equal_what_transformers_returns(tmp_path, name, precision, tolerance):
    dtype = {"fp64": torch.float64, "fp32": torch.float32}[precision]
    ids = torch.randint(64, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    theirs, outputs = reference(name, dtype, ids)
    *_, qk_norm, ffn = MODELS[name]
    rope = PlainRope(theta=theirs.config.rope_parameters["rope_theta"])
    attention = GroupedQueryAttention(
        heads=4, kv_heads=2, head_dim=8, qk_norm=qk_norm, qk_norm_eps=1e-5, backend="math", rope=rope
    )
    component = Transformer(vocab_size=64, dim=32, layers=LAYERS, attention=attention, ffn=ffn, norm=RMSNorm(eps=1e-5))
    model = tiny_run(tmp_path, model=component, precision=precision, seq_len=LENGTH).model.eval()
    model.load_state_dict(from_huggingface(theirs.state_dict()))
    routers = ["layers.*.router_logits"] if ffn is EXPERTS else []
    seen = dict(read_points(model, {"input_ids": ids}, [*routers, "layers.*.resid_pre", "final_norm"]).values)

    def compare(name: str, ours: Tensor, expected: Tensor) -> None:
        assert expected.std() > 0.01, name  # else nothing would be compared
        assert (ours - expected).abs().max() < tolerance, name

    for layer in range(LAYERS):
        compare(f"stream {layer}", seen.pop(f"layers.{layer}.resid_pre"), outputs.hidden_states[layer])
        if routed := getattr(outputs, "router_logits", None):
            compare(f"router {layer}", seen.pop(f"layers.{layer}.router_logits"), routed[layer].unflatten(0, ids.shape))
    compare("end", seen.pop("final_norm"), outputs.hidden_states[-1])
    assert not seen
    maps, lens = attention_maps(model, ids[0]), logit_lens(model, ids[0], 64)
    for layer in range(LAYERS):
        compare(f"attention {layer}", maps.weights[layer], outputs.attentions[layer][0])
    with computing_in(dtype), torch.no_grad():
        early = theirs.lm_head(theirs.model.norm(outputs.hidden_states[2]))[0].softmax(-1)
    assert lens.names[2] == "layers.1.resid_post"
    compare("lens", lens.probabilities[2], early.sort(descending=True).values)
