"""Experts and routers keep the contracts of their kinds."""

from __future__ import annotations

import attrs
import pytest

from forge_plugin_moe import ExpertChoice, Hash, MoE, SigmoidTopK, SoftmaxTopK
from forge_plugin_transformer import Canon, GroupedQueryAttention, RMSNorm, Transformer
from forge_testing.suites import ModelSuite, RouterSuite
from forge_testing.suites.parity import ParitySuite

BALANCED = {"sequence_balance": 10.0, "batch_balance": 10.0, "z_loss": 10.0}


GPT_OSS = {"bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 0.02, "swiglu_offset": 1.0}
"""With a limit that the small numbers of a new model exceed, too."""


def model_of(**keys):
    ffn = MoE(**{"experts": 4, "hidden": 16, **keys})
    return Transformer(dim=16, layers=2, vocab_size=32, attention=GroupedQueryAttention(heads=4, kv_heads=2), ffn=ffn)


class TestSoftmaxTopK(RouterSuite):
    component = SoftmaxTopK(top_k=3, **BALANCED)


class TestGroupLimited(RouterSuite):
    component = SoftmaxTopK(top_k=2, groups=4, top_groups=2, normalise="before", scaling=2.5)


class TestSigmoidTopK(RouterSuite):
    component = SigmoidTopK(top_k=2, groups=2, **BALANCED)


class TestExpertChoice(RouterSuite):
    component = ExpertChoice(capacity_factor=2.0)


class TestHash(RouterSuite):
    component = Hash(top_k=2)


class TestModelWithExperts(ModelSuite):
    waits = {"experts.py": 3}
    component = model_of(router=SigmoidTopK(bias_rate=0.01, **BALANCED), shared_experts=1, first_dense=1)
    layouts = ("replicate2", "tp2", "pp2", "cp2", "checkpointing2")


class TestModelWithBiases(ModelSuite):
    """`TestBiasesUnderLayouts` has the same experts under the other layouts."""

    waits = {"experts.py": 6}
    component = model_of(router=SoftmaxTopK(bias=True), **GPT_OSS)
    layouts = ("replicate2",)


class TestModelWithSquaredReLU(ModelSuite):
    """Experts of two matrices, routed and shared."""

    waits = {"experts.py": 4}
    component = model_of(activation="relu2", shared_experts=1, router=SigmoidTopK(bias_rate=0.01))
    layouts = ("tp2_whole_sequences", "fsdp2_ep2")


class TestModelWithWeightsOnInputs(ModelSuite):
    """Experts read tokens times their weights, as in Llama 4, with a router that has no bias."""

    waits = {"experts.py": 6}
    component = model_of(
        apply_router_weight_on_input=True, shared_experts=1,
        router=SigmoidTopK(correction_bias=False, normalise=False, **BALANCED),
    )  # fmt: skip
    layouts = ("tp2", "fsdp2_ep2")  # tests/composition compiles such experts


class TestModelWithNormsOfBranches(ModelSuite):
    """Routed and shared experts have norms of their own, and the router reads the stream, as in Gemma 4."""

    waits = {"experts.py": 6}
    component = model_of(
        activation="geglu", shared_experts=2, branch_norm=RMSNorm(),
        router=SoftmaxTopK(input_norm=True, expert_scale=True, **BALANCED),
    )  # fmt: skip
    layouts = ("tp2", "tp2_whole_sequences", "fsdp2_ep2")


@pytest.mark.thorough
class TestNormsOfBranchesElsewhere(ParitySuite):
    waits = {"experts.py": 6}
    layouts = ("fsdp2", "pp2", "traced")

    def parity_changes(self, folder):
        return {"model": TestModelWithNormsOfBranches.component}


class TestExpertParallel(ParitySuite):
    """The other layouts with `ep` are rows of `tests/parity/layouts.py`, with this router."""

    waits = {"experts.py": 6}
    layouts = ("checkpointing_fsdp2_ep2", "fsdp4_ep2", "fsdp2_pp2_ep2")

    def parity_changes(self, folder):
        return {"model": model_of(router=SigmoidTopK(bias_rate=0.01, **BALANCED), shared_experts=1)}


class TestExpertsBehindCanonLayers(ParitySuite):
    waits = {"experts.py": 6}
    layouts = ("tp2", "cp2")

    def parity_changes(self, folder):
        return {"model": attrs.evolve(model_of(router=SoftmaxTopK(), shared_experts=1), canon=Canon())}


class TestModelWithCapacity(ParitySuite):
    waits = {"experts.py": 8}
    layouts = ("fsdp2", "tp2")

    def parity_changes(self, folder):
        return {"model": model_of(capacity_factor=1.0, router=SoftmaxTopK(z_loss=10.0))}


class TestModelWithChoosingExperts(ParitySuite):
    waits = {"experts.py": 8}
    layouts = ("tp2",)

    def parity_changes(self, folder):
        return {"model": model_of(router=ExpertChoice())}


class TestBiasesUnderLayouts(ParitySuite):
    """`tests/composition/test_experts.py` compiles the same model."""

    waits = {"experts.py": 6}
    layouts = ("tp2_whole_sequences", "cp2", "fsdp2_tp2_ep2", "checkpointing_fsdp2_ep2")

    def parity_changes(self, folder):
        return {"model": model_of(router=SoftmaxTopK(bias=True, z_loss=10.0), shared_experts=1, **GPT_OSS)}
