"""`mla` keeps the contracts of attentions, in models under every layout."""

from __future__ import annotations

from forge_plugin_mla import MultiHeadLatentAttention
from forge_plugin_transformer import Transformer, YarnRope
from forge_testing.suites import ModelSuite

WIDTHS = {"kv_lora_rank": 6, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}


class TestMLA(ModelSuite):
    component = Transformer(
        vocab_size=32, dim=16, layers=2, attention=MultiHeadLatentAttention(heads=4, q_lora_rank=10, **WIDTHS)
    )
    layouts = ("tp2_whole_sequences", "cp2", "checkpointing2")


class TestMLAWithoutQueryLatents(ModelSuite):
    needs_cpu = "its job names the flash kernel, which others have in half precision only"
    component = Transformer(
        vocab_size=32, dim=16, layers=2,
        attention=MultiHeadLatentAttention(
            heads=2, rope_interleave=True, backend="flash", **WIDTHS,
            rope=YarnRope(factor=4.0, original_max_position_embeddings=4, mscale=1.0, mscale_all_dim=0.8),
        ),
    )  # fmt: skip
    layouts = ("tp2", "compiled")
