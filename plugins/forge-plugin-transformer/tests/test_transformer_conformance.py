"""`transformer` keeps the contracts of its kind, with its own parts and others."""

from __future__ import annotations

from forge_plugin_transformer import GELU, GroupedQueryAttention, LayerNorm, MultiTokenPrediction, Transformer
from forge_testing.distribution import check_distribution
from forge_testing.suites import ModelSuite


def test_the_distribution():
    check_distribution("forge-plugin-transformer")


class TestTransformer(ModelSuite):
    component = Transformer(
        vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=4, kv_heads=2, qk_norm=True)
    )


class TestTiedTransformerOfOtherParts(ModelSuite):
    component = Transformer(
        vocab_size=32, dim=16, layers=2, tie_embeddings=True, norm=LayerNorm(), ffn=GELU(),
        attention=GroupedQueryAttention(heads=4, kv_heads=2),
    )  # fmt: skip
    layouts = ("tp2", "pp2")


class TestTransformerThatPredictsFurther(ModelSuite):
    """Its layouts are in tests/parity."""

    component = Transformer(
        vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=4, kv_heads=2),
        mtp=MultiTokenPrediction(depth=2),
    )  # fmt: skip
    layouts = ()
