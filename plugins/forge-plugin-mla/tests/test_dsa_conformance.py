"""`dsa` keeps the contracts of attentions, in models under every layout."""

from __future__ import annotations

import pytest

from forge_plugin_mla import DeepSeekSparseAttention
from forge_plugin_transformer import Transformer
from forge_testing.suites import ModelSuite

WIDTHS = {"kv_lora_rank": 6, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}


class TestDSA(ModelSuite):
    component = Transformer(
        vocab_size=32, dim=16, layers=2,
        attention=DeepSeekSparseAttention(
            heads=4, q_lora_rank=10, index_n_heads=3, index_head_dim=6, index_topk=3, index_loss_weight=0.3, **WIDTHS
        ),
    )  # fmt: skip
    layouts = ("tp2_whole_sequences", "pp2", "cp2", "checkpointing2")


@pytest.mark.thorough
class TestDSACompiled(ModelSuite):
    component = TestDSA.component
    layouts = ("compiled", "fsdp2_cp2", "fsdp2_tp2")
