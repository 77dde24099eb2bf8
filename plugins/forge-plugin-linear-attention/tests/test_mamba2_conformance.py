"""`mamba2` keeps the contracts of attentions, alone and beside softmax attention, under every layout."""

from __future__ import annotations

from forge_plugin_linear_attention import Mamba2
from forge_plugin_transformer import AttentionPattern, GroupedQueryAttention, Transformer
from forge_testing.suites import ModelSuite


class TestMamba2(ModelSuite):
    component = Transformer(
        vocab_size=32, dim=16, layers=2, attention=Mamba2(heads=4, head_dim=5, state=3, groups=2, chunk=4)
    )
    layouts = ("tp2_whole_sequences", "checkpointing2")  # cp2, with documents: test_mamba2.py


class TestHybridOfOneGroup(ModelSuite):
    """Each rank needs the only group; those of tensor parallel add up squares for the norm of all heads."""

    component = Transformer(
        vocab_size=32,
        dim=16,
        layers=2,
        attention=AttentionPattern(
            kinds={
                "mamba": Mamba2(heads=4, state=3, bias=True, norm="before", chunk=4),
                "full": GroupedQueryAttention(heads=4, kv_heads=2),
            },
            layers=("mamba", "full"),
        ),
    )
    layouts = ("tp2_whole_sequences",)
