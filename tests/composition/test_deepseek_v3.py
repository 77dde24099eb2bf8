"""Latent attention and experts together are DeepSeek-V3: the same weights give the logits of `transformers`' model."""

from __future__ import annotations

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from forge_core.testing.runs import tiny_run
from forge_plugin_mla import MultiHeadLatentAttention
from forge_plugin_mla.huggingface_names import PARTS
from forge_plugin_moe import MoE, SigmoidTopK
from forge_plugin_moe.huggingface_names import from_huggingface
from forge_plugin_transformer import PlainRope, RMSNorm, SwiGLU, Transformer

WIDTHS = {"q_lora_rank": 14, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}


def reference():
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=32, intermediate_size=56, moe_intermediate_size=24, num_hidden_layers=3, first_k_dense_replace=1,
        vocab_size=61, num_attention_heads=4, num_key_value_heads=4, rms_norm_eps=1e-6, tie_word_embeddings=False,
        n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, n_shared_experts=1, norm_topk_prob=True,
        routed_scaling_factor=2.5, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **WIDTHS,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config).eval().requires_grad_(False)
    for name, tensor in model.state_dict().items():
        tensor.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    return model


def test_logits_are_those_of_transformers(tmp_path):
    theirs = reference()
    router = SigmoidTopK(top_k=3, groups=4, top_groups=2, scaling=2.5)
    ffn = MoE(experts=8, hidden=24, router=router, shared_experts=1, first_dense=1, dense=SwiGLU(hidden=56))
    attention = MultiHeadLatentAttention(heads=4, rope=PlainRope(theta=1e4), rope_interleave=True, **WIDTHS)
    model = Transformer(dim=32, layers=3, vocab_size=61, attention=attention, ffn=ffn, norm=RMSNorm(eps=1e-6))
    ours = tiny_run(tmp_path, model=model).model
    ours.load_state_dict(from_huggingface(theirs.state_dict(), PARTS))
    ids = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        seen, expected = ours.head.logits(ours({"input_ids": ids})), theirs(ids).logits
    assert expected.std() > 0.5
    assert (seen - expected).abs().max() < 1e-4
