"""`gated_deltanet` keeps the contracts of attentions, alone and beside softmax attention, under every layout."""

from __future__ import annotations

from forge_plugin_linear_attention import GatedDeltaNet
from forge_plugin_transformer import AttentionPattern, GroupedQueryAttention, Transformer
from forge_testing.suites import ModelSuite

DELTA = GatedDeltaNet(heads=4, key_heads=2, head_dim=3, value_dim=5, chunk=4)


class TestGatedDeltaNet(ModelSuite):
    component = Transformer(vocab_size=32, dim=16, layers=2, attention=DELTA)
    layouts = ("tp2_whole_sequences", "cp2", "checkpointing2")


class TestHybrid(ModelSuite):
    component = Transformer(
        vocab_size=32,
        dim=16,
        layers=2,
        attention=AttentionPattern(
            kinds={"delta": DELTA, "full": GroupedQueryAttention(heads=4, kv_heads=2)}, layers=("delta", "full")
        ),
    )
    layouts = ("cp2",)
