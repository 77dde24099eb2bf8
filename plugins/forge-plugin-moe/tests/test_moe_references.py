"""The same weights give what `transformers`' Mixtral, Qwen3-MoE, Qwen2-MoE and DeepSeek-V3's experts give."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from forge_core.testing.runs import tiny_run
from forge_plugin_moe import MoE, SigmoidTopK, SoftmaxTopK
from forge_plugin_transformer import GroupedQueryAttention, PlainRope, RMSNorm, SwiGLU, Transformer
from forge_plugin_transformer.huggingface_names import from_huggingface

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "tie_word_embeddings": False, "num_experts_per_tok": 2}
ATTENTION = {"heads": 4, "kv_heads": 2}

EXPERTS = {
    "gate.weight": "router.weight",
    "experts.down_proj": "experts.down.weight",
    "shared_expert.gate_proj.weight": "shared.gate.weight",
    "shared_expert.up_proj.weight": "shared.up.weight",
    "shared_expert.down_proj.weight": "shared.down.weight",
    "shared_experts.gate_proj.weight": "shared.gate.weight",
    "shared_experts.up_proj.weight": "shared.up.weight",
    "shared_experts.down_proj.weight": "shared.down.weight",
    "shared_expert_gate.weight": "shared_gate.weight",
    "gate.e_score_correction_bias": "router.bias",
}
"""Names inside a part with experts: theirs and ours."""


def converted(state):
    """Their weights by our names."""
    for name, tensor in state.items():
        layer, found, key = name.partition(".mlp.")
        ours = f"layers.{layer.rpartition('.')[2]}.ffn." if found else ""
        if key == "experts.gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            yield from ((f"{ours}experts.gate.weight", gate), (f"{ours}experts.up.weight", up))
        elif key in EXPERTS:
            yield f"{ours}{EXPERTS[key]}", tensor
        else:
            yield from_huggingface(name), tensor


def logits(model, ids, tmp_path):
    run = tiny_run(tmp_path, model=model, seq_len=ids.shape[1])
    return run.model, lambda: run.model.head.logits(run.model({"input_ids": ids}))


MODELS = {
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=8, sliding_window=None, rms_norm_eps=1e-5),
        {"attention": {**ATTENTION}, "ffn": MoE(experts=8, hidden=48, router=SoftmaxTopK(top_k=2)), "eps": 1e-5},
    ),
    "qwen3, first layer dense": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **SIZES,
            intermediate_size=96,
            moe_intermediate_size=24,
            head_dim=8,
            num_experts=8,
            mlp_only_layers=[0],
            norm_topk_prob=True,
        ),
        {
            "attention": {**ATTENTION, "qk_norm": True},
            "ffn": MoE(experts=8, hidden=24, first_dense=1, dense=SwiGLU(hidden=96)),
            "eps": 1e-6,
        },
    ),
    "qwen2, every other layer, gated shared expert": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig(
            **SIZES,
            intermediate_size=96,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=48,
            num_experts=8,
            decoder_sparse_step=2,
            norm_topk_prob=False,
            qkv_bias=False,
        ),
        {
            "attention": {**ATTENTION},
            "ffn": MoE(
                experts=8,
                hidden=24,
                router=SoftmaxTopK(normalise="before"),
                shared_experts=2,
                shared_gate=True,
                every=2,
                dense=SwiGLU(hidden=96),
            ),
            "eps": 1e-6,
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(tmp_path, name):
    kind, config, ours = MODELS[name]
    torch.manual_seed(0)
    theirs = kind(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    theta = config.rope_parameters["rope_theta"]
    attention = GroupedQueryAttention(**ours["attention"], rope=PlainRope(theta=theta))
    model = Transformer(
        dim=32, layers=3, vocab_size=64, attention=attention, ffn=ours["ffn"], norm=RMSNorm(eps=ours["eps"])
    )
    ids = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1))
    network, compute = logits(model, ids, tmp_path)
    network.load_state_dict(dict(converted(theirs.state_dict())))
    with torch.no_grad():
        seen, expected = compute(), theirs(ids).logits
    assert expected.std() > 0.5, "else nothing would be compared"
    assert (seen - expected).abs().max() < 1e-4


@pytest.mark.parametrize("normalise", [True, False])
def test_experts_are_those_of_deepseek_v3(tmp_path, normalise):
    """Sigmoid scores, a bias that only selects, the best groups by their two best members, shared experts."""
    config = DeepseekV3Config(
        hidden_size=32,
        moe_intermediate_size=24,
        n_routed_experts=16,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=normalise,
    )
    torch.manual_seed(0)
    theirs = DeepseekV3MoE(config).eval()
    with torch.no_grad():
        for tensor in theirs.state_dict().values():
            tensor.normal_(0.0, 0.3)
    router = SigmoidTopK(top_k=3, groups=4, top_groups=2, scaling=2.5, normalise=normalise)
    ffn = MoE(experts=16, hidden=24, router=router, shared_experts=2)
    run = tiny_run(tmp_path, model=Transformer(dim=32, layers=1, vocab_size=8, ffn=ffn))
    ours = run.model.layers["0"].ffn
    state = {f"model.layers.0.mlp.{name}": tensor for name, tensor in theirs.state_dict().items()}
    ours.load_state_dict({name.removeprefix("layers.0.ffn."): tensor for name, tensor in converted(state)})
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        seen, expected = ours(x, {}), theirs(x)
    assert expected.std() > 0.5
    assert (seen - expected).abs().max() < 1e-4
