"""`transformer` keeps the contracts of its kind, with its own parts and others."""

from __future__ import annotations

import pytest
from attrs import evolve

from forge_plugin_transformer import (
    GEGLU,
    GELU,
    XIELU,
    AltUp,
    AttentionPattern,
    DynamicRope,
    GroupedQueryAttention,
    LayerNorm,
    LongRope,
    MultiTokenPrediction,
    NoRope,
    PerLayerInputs,
    PlainRope,
    ProportionalRope,
    RMSNorm,
    RopeComponent,
    SquaredReLU,
    Transformer,
)
from forge_testing.suites import ModelSuite
from forge_testing.suites.parity import ParitySuite


class TestTransformer(ModelSuite):
    component = Transformer(
        vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=4, kv_heads=2, qk_norm=True)
    )


class TestTiedTransformerOfOtherParts(ModelSuite):
    component = Transformer(
        vocab_size=32, dim=16, layers=2, tie_embeddings=True, norm=LayerNorm(), ffn=GELU(),
        attention=GroupedQueryAttention(heads=4, kv_heads=2, qk_norm="layer", gate=True),
    )  # fmt: skip
    layouts = ("tp2", "pp2")


class TestTransformerThatPredictsFurther(ModelSuite):
    """Its layouts are in tests/parity."""

    component = Transformer(
        vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=4, kv_heads=2),
        mtp=MultiTokenPrediction(depth=2),
    )  # fmt: skip
    layouts = ()


class TestTransformerLikeOlmo(ModelSuite):
    """Norms after the parts; queries and keys are normalised over all heads, which tp divides."""

    component = Transformer(
        vocab_size=32, dim=16, layers=2, norm_placement="post",
        attention=GroupedQueryAttention(heads=4, kv_heads=2, qk_norm="all", gate="head"),
    )  # fmt: skip
    layouts = ("tp2", "tp2_whole_sequences")
    loss_tolerance = 1e-10  # of gradient norms, which are large behind norms of small outputs; losses: 1e-14


HEADS = {"heads": 4, "kv_heads": 2}
GEMMA = GroupedQueryAttention(**HEADS, qk_norm=True, qk_norm_offset=1, scale=0.4)


class TestTransformerLikeGemma(ModelSuite):
    """Factors at both ends, one table for them, bounded logits, and a window in every other layer."""

    component = Transformer(
        vocab_size=32, dim=16, layers=2, norm_placement="both", norm=RMSNorm(offset=1), ffn=GEGLU(hidden=32),
        embedding_scale=4.0, logit_scale=0.5, logit_soft_cap=3.0, tie_embeddings=True,
        attention=AttentionPattern(layers=("near", "full"), kinds={"near": evolve(GEMMA, window=5), "full": GEMMA}),
    )  # fmt: skip
    layouts = ("tp2_whole_sequences", "pp2", "traced")


WIDE = GroupedQueryAttention(
    heads=4, kv_heads=2, head_dim=8, qk_norm=True, v_norm=True, k_eq_v=True, scale=1.0,
    rope=ProportionalRope(partial_rotary_factor=0.5),
)  # fmt: skip
NARROW = GroupedQueryAttention(heads=4, kv_heads=4, head_dim=4, qk_norm=True, v_norm=True, scale=1.0, window=5)


class TestTransformerLikeGemma4(ModelSuite):
    """Layers with heads of two widths, of which one takes keys for values, and a factor behind each layer."""

    component = Transformer(
        vocab_size=32, dim=16, layers=2, norm_placement="both", ffn=GEGLU(hidden=32), tie_embeddings=True,
        layer_scalar=True, attention=AttentionPattern(layers=("near", "full"), kinds={"near": NARROW, "full": WIDE}),
    )  # fmt: skip
    layouts = ("tp2_whole_sequences",)


NEAR = GroupedQueryAttention(
    heads=4, kv_heads=4, head_dim=8, v_head_dim=4, value_scale=0.7, window=5, sinks=True,
    rope=PlainRope(partial_rotary_factor=0.5),
)  # fmt: skip


class TestTransformerLikeMiMo(ModelSuite):
    """Values narrower than keys, and scaled; sinks, and more of the shared heads, in layers with a window only."""

    component = Transformer(
        vocab_size=32, dim=16, layers=2, ffn=GEGLU(hidden=32),
        attention=AttentionPattern(
            layers=("full", "near"),
            kinds={"near": NEAR, "full": evolve(NEAR, kv_heads=2, window=0, sinks=False, gate=True)},
        ),
    )  # fmt: skip
    layouts = ("tp2_whole_sequences", "cp2")


class TestTransformerLikeSmallGemma4(ModelSuite):
    """Layers that attend to keys of others, of both kinds of attention, and an input of each layer."""

    component = Transformer(
        vocab_size=32, dim=16, layers=5, norm_placement="both", ffn=GEGLU(hidden=32), tie_embeddings=True,
        layer_scalar=True, kv_shared_layers=3, per_layer_inputs=PerLayerInputs(dim=4),
        attention=AttentionPattern(layers=("near", "full"), kinds={"near": NARROW, "full": WIDE}),
    )  # fmt: skip
    layouts = ("tp2", "pp2")


class TestTransformerLikeGemma3n(ModelSuite):
    """Streams that layers predict and correct, a learned residual beside attention, and sparse gates."""

    component = Transformer(
        vocab_size=32, dim=16, layers=4, norm_placement="both", ffn=GEGLU(hidden=32, sparsity=0.7),
        tie_embeddings=True, kv_shared_layers=2, per_layer_inputs=PerLayerInputs(dim=4), laurel_rank=3,
        altup=AltUp(inputs=3, active=1), attention=GroupedQueryAttention(heads=4, kv_heads=2, qk_norm=True),
    )  # fmt: skip
    layouts = ("tp2", "pp2")


ELSEWHERE = ("fsdp2", "tp2_whole_sequences", "cp2", "checkpointing2", "traced")


@pytest.mark.thorough
class TestGemma4Elsewhere(ParitySuite):
    layouts = ("tp2", "pp2", *ELSEWHERE)

    def parity_changes(self, folder):
        return {"model": TestTransformerLikeGemma4.component}


@pytest.mark.thorough
class TestSmallGemma4Elsewhere(ParitySuite):
    layouts = ELSEWHERE

    def parity_changes(self, folder):
        return {"model": TestTransformerLikeSmallGemma4.component}


@pytest.mark.thorough
class TestGemma3nElsewhere(ParitySuite):
    layouts = ELSEWHERE

    def parity_changes(self, folder):
        return {"model": TestTransformerLikeGemma3n.component}


class TestTransformerLikeGPT(ModelSuite):
    """Learned positions, and both parts of a block at once."""

    component = Transformer(
        vocab_size=32, dim=16, layers=2, residual="parallel", learned_positions=64, norm=LayerNorm(),
        ffn=GELU(bias=True), attention=GroupedQueryAttention(heads=4, bias=True),
    )  # fmt: skip
    layouts = ("tp2", "tp2_whole_sequences", "pp2", "cp2")


class TestTransformerLikePhi(ModelSuite):
    """One norm for both parts of a block, and a bias of the logits."""

    component = Transformer(
        vocab_size=32, dim=16, layers=2, residual="parallel", norm_placement="shared", head_bias=True,
        norm=LayerNorm(), ffn=GELU(bias=True), attention=GroupedQueryAttention(heads=4, bias=True),
    )  # fmt: skip
    layouts = ("tp2_whole_sequences",)  # `TestTransformerWithASharedNormThatPredictsFurther`: tp2, pp2


class TestTransformerLikeNemotron(ModelSuite):
    """Squared ReLU, layer norms of small weights; queries and keys normalised late, and larger at later positions."""

    component = Transformer(
        vocab_size=32, dim=16, layers=2, norm=LayerNorm(offset=1), ffn=SquaredReLU(bias=True),
        attention=GroupedQueryAttention(
            heads=4, kv_heads=2, qk_norm=True, qk_norm_rotated=True, query_growth=0.5, query_growth_length=3,
        ),
    )  # fmt: skip
    layouts = ("tp2_whole_sequences", "cp2", "traced")


class TestTransformerLikeApertus(ModelSuite):
    """An activation with learned slopes, which tensor-parallel ranks apply to some of the features each."""

    component = Transformer(
        vocab_size=32, dim=16, layers=2, ffn=XIELU(hidden=24),
        attention=GroupedQueryAttention(heads=4, kv_heads=2, qk_norm=True),
    )  # fmt: skip
    layouts = ("fsdp2", "tp2_whole_sequences", "traced")


class TestTransformerWithASharedNormThatPredictsFurther(ModelSuite):
    component = Transformer(
        vocab_size=32, dim=16, layers=2, residual="parallel", norm_placement="shared", head_bias=True,
        logit_scale=0.5, tie_embeddings=True, mtp=MultiTokenPrediction(),
        attention=GroupedQueryAttention(heads=4, kv_heads=2),
    )  # fmt: skip
    layouts = ("tp2", "pp2")


class TestTransformerWithEveryOptionThatPredictsFurther(ModelSuite):
    component = Transformer(
        vocab_size=32, dim=16, layers=2, norm_placement="both", residual="parallel", learned_positions=64,
        embedding_scale=4.0, residual_scale=0.5, logit_soft_cap=3.0, mtp=MultiTokenPrediction(),
        attention=GroupedQueryAttention(heads=4, kv_heads=2, qk_norm="all", qk_norm_offset=1),
    )  # fmt: skip
    layouts = ("tp2", "pp2")


class TestTransformerThatRotatesAPart(ModelSuite):
    component = Transformer(
        vocab_size=32, dim=32, layers=2,
        attention=GroupedQueryAttention(heads=4, kv_heads=2, rope=PlainRope(partial_rotary_factor=0.25)),
    )  # fmt: skip
    layouts = ()  # `TestTransformerWhoseLayersDiffer` has such a layer


class TestTransformerWithoutPositions(ModelSuite):
    component = Transformer(
        vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=4, kv_heads=2, rope=NoRope())
    )
    layouts = ()  # `TestTransformerWhoseLayersDiffer` has such a layer


class RopesOfTheLengthOfTheJob(ParitySuite):
    """Sequences are long, which a rank of `cp` cannot see by the positions that it has."""

    rope: RopeComponent

    def parity_changes(self, folder):
        attention = GroupedQueryAttention(heads=2, rope=self.rope)
        return {"model": Transformer(vocab_size=32, dim=16, layers=2, attention=attention)}


class TestLongRope(RopesOfTheLengthOfTheJob):
    layouts = ("tp2", "cp2", "traced")
    rope = LongRope(
        short_factor=(1.0, 1.5), long_factor=(2.0, 9.0), original_max_position_embeddings=8, factor=2.0,
        partial_rotary_factor=0.5,
    )  # fmt: skip


class TestDynamicRope(RopesOfTheLengthOfTheJob):
    layouts = ("cp2", "pp2", "traced")
    rope = DynamicRope(factor=4.0, original_max_position_embeddings=8)


class TestTransformerOfSeveralAttentions(ModelSuite):
    """A window, sinks and a scale by one kernel, a cap by another, and neither."""

    needs_cpu = "its job names the flash kernel, which others have in half precision only"
    component = Transformer(
        vocab_size=32, dim=16, layers=3,
        attention=AttentionPattern(
            layers=("window", "capped", "full"),
            kinds={
                "window": GroupedQueryAttention(**HEADS, window=3, sinks=True, scale=0.4, backend="flash"),
                "capped": GroupedQueryAttention(**HEADS, window=5, sinks=True, soft_cap=0.5, backend="gemm"),
                "full": GroupedQueryAttention(**HEADS),
            },
        ),
    )  # fmt: skip
    layouts = ("tp2_whole_sequences", "cp2", "checkpointing2", "compiled")


BIASED = {**HEADS, "bias": True, "output_bias": False}
QUARTER = PlainRope(theta=100.0, partial_rotary_factor=0.25)


class TestTransformerWhoseLayersDiffer(ModelSuite):
    """In bases, parts and absence of positions, and windows; with biases of queries, keys and values, as Qwen2."""

    component = Transformer(
        vocab_size=32, dim=32, layers=3, norm_placement="both", norm=RMSNorm(offset=1), ffn=GEGLU(hidden=32),
        embedding_scale=4.0, logit_scale=0.5, logit_soft_cap=3.0,
        attention=AttentionPattern(
            layers=("near", "far", "nowhere"),
            kinds={
                "near": GroupedQueryAttention(**BIASED, window=5, rope=QUARTER),
                "far": GroupedQueryAttention(**BIASED, rope=PlainRope(theta=1e6)),
                "nowhere": GroupedQueryAttention(**BIASED, rope=NoRope()),
            },
        ),
    )  # fmt: skip
    layouts = ("tp2", "pp2", "cp2")


class TestPatternThatPredictsFurther(ModelSuite):
    """The pattern goes on in the modules of multi-token prediction."""

    component = Transformer(
        vocab_size=32, dim=16, layers=2, mtp=MultiTokenPrediction(depth=1),
        attention=AttentionPattern(
            layers=("window", "full"),
            kinds={
                "window": GroupedQueryAttention(**HEADS, window=4, sinks=True),
                "full": GroupedQueryAttention(**HEADS),
            },
        ),
    )  # fmt: skip
    layouts = ("pp2",)
