"""Latent attention and experts together are DeepSeek-V3: the same weights give the logits of `transformers`' model, and
multi-token prediction what its weights do that are named as in the release."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

from forge_plugin_mla import MultiHeadLatentAttention
from forge_plugin_mla.huggingface_names import PARTS
from forge_plugin_moe import MoE, SigmoidTopK
from forge_plugin_moe.huggingface_names import from_huggingface, to_huggingface
from forge_plugin_transformer import MultiTokenPrediction, PlainRope, RMSNorm, SwiGLU, Transformer
from forge_testing.runs import tiny_run

LAYERS = 3
WIDTHS = {"q_lora_rank": 14, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}


def reference():
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=32, intermediate_size=56, moe_intermediate_size=24, num_hidden_layers=LAYERS,
        first_k_dense_replace=1, vocab_size=61, num_attention_heads=4, num_key_value_heads=4, rms_norm_eps=1e-6,
        tie_word_embeddings=False, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
        n_shared_experts=1, norm_topk_prob=True, routed_scaling_factor=2.5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **WIDTHS,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config).eval().requires_grad_(False)
    draw(model)
    return model


def draw(module):
    for name, tensor in module.state_dict().items():
        tensor.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)


class Module(DeepseekV3DecoderLayer):
    """The layer after the last, as in the released weights; the release has no code for it but that of its report."""

    def __init__(self, config):
        super().__init__(config, LAYERS)
        self.enorm, self.hnorm = (DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)})

    def logits(self, model, ids, hidden):
        embedded, hidden = model.model.embed_tokens(ids[:, 1:]), hidden[:, :-1]
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        positions = torch.arange(x.shape[1])[None]
        mask = create_causal_mask(model.config, x, None, None, positions)
        turns = model.model.rotary_emb(x, positions)
        x = super().forward(x, attention_mask=mask, position_ids=positions, position_embeddings=turns)
        return model.lm_head(self.shared_head["norm"](x))


@pytest.fixture
def ours(tmp_path):
    router = SigmoidTopK(top_k=3, groups=4, top_groups=2, scaling=2.5)
    ffn = MoE(experts=8, hidden=24, router=router, shared_experts=1, first_dense=1, dense=SwiGLU(hidden=56))
    attention = MultiHeadLatentAttention(heads=4, rope=PlainRope(theta=1e4), rope_interleave=True, **WIDTHS)

    def build(**keys):
        keys = {"attention": attention, "ffn": ffn, "norm": RMSNorm(eps=1e-6), **keys}
        return tiny_run(tmp_path, model=Transformer(dim=32, layers=LAYERS, vocab_size=61, **keys))

    return build


def test_logits_are_those_of_transformers(ours):
    theirs, model = reference(), ours().model
    model.load_state_dict(from_huggingface(theirs.state_dict(), PARTS))
    ids = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        seen, expected = model.head.logits(model({"input_ids": ids})), theirs(ids).logits
    assert expected.std() > 0.5
    assert (seen - expected).abs().max() < 1e-4


def test_multi_token_prediction_is_that_of_the_released_weights(ours):
    theirs, run = reference(), ours(mtp=MultiTokenPrediction())
    module = Module(theirs.config).eval().requires_grad_(False)
    draw(module)
    released = {f"model.layers.{LAYERS}.{name}": tensor for name, tensor in module.state_dict().items()}
    copies = {"embed_tokens": theirs.model.embed_tokens.weight, "shared_head.head": theirs.lm_head.weight}
    released |= {f"model.layers.{LAYERS}.{name}.weight": tensor for name, tensor in copies.items()}
    state = from_huggingface(theirs.state_dict() | released, PARTS, LAYERS)
    assert from_huggingface(to_huggingface(state, PARTS, LAYERS), PARTS, LAYERS).keys() == state.keys()
    run.model.load_state_dict(state)
    ids = torch.randint(61, (2, 25), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    run.context.auxiliary.begin_step(torch.tensor(48), 2, 1)
    run.model(batch)
    seen = run.context.auxiliary.totals()["mtp/loss"].item()
    logits = module.logits(theirs, ids[:, :-1], theirs.model(ids[:, :-1]).last_hidden_state)
    expected = F.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten(), reduction="sum") / 48
    assert logits.std() > 0.5
    assert seen == pytest.approx(expected.item(), abs=1e-5)
