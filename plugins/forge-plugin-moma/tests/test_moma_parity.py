"""One curve under every layout: rows of text, images and videos, with every loss so heavy that a wrong scale shows."""

from __future__ import annotations

from attrs import validators
from moma_marked import VOCABULARY, Marked, Mixed

from forge_plugin_moe import MoE
from forge_plugin_moma import MoMa
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_plugin_vision import VisionLanguage
from forge_testing.suites.parity import ParitySuite
from forge_testing.vision import RandomImages, tiny_vision

GROUPS = {"text": 3, "image": 2, "video": 1}


def language_of(router: MoMa) -> Transformer:
    attention = GroupedQueryAttention(heads=4, kv_heads=2)
    ffn = MoE(experts=6, hidden=16, router=router, shared_experts=1)
    return Transformer(vocab_size=VOCABULARY, dim=16, layers=2, attention=attention, ffn=ffn)


class MoMaParitySuite(ParitySuite):
    router: MoMa

    def parity_changes(self, folder):
        model = Marked(language=language_of(self.router))
        return {"model": model, "data": {"sources": (Mixed(),)}, "grad_clip_norm": 0.5}


class TestTokensChoose(MoMaParitySuite):
    waits = {"experts.py": 6}
    layouts = ("tp2", "tp2_whole_sequences", "pp2", "cp2", "checkpointing2", "fsdp2_ep2")
    router = MoMa(
        experts=GROUPS,
        gumbel_noise=True,
        z_loss=10.0,
        init_std=0.5,
        sequence_balance=10.0,
        batch_balance=10.0,
        bias_rate=0.05,
    )


class TestExpertsChoose(MoMaParitySuite):
    waits = {"experts.py": 8}
    layouts = ("tp2_whole_sequences", "cp2", "checkpointing2", "fsdp2_ep2")
    router = MoMa(experts=GROUPS, choose="experts", gumbel_noise=True, z_loss=10.0, init_std=0.5, auxiliary_weight=10.0)


class TestExpertsChooseAmongImages(ParitySuite):
    """With a vision tower and fusion `joint`."""

    waits = {"experts.py": 8}
    layouts = ("tp2", "cp2")

    def parity_changes(self, folder):
        router = MoMa(experts={"text": 3, "image": 3}, choose="experts", init_std=0.5, auxiliary_weight=10.0)
        model = VisionLanguage(language=language_of(router), vision=tiny_vision())
        return {"model": model, "data": {"sources": (RandomImages(held_out=5),)}, "seq_len": 24}


class TestEqualScores(ParitySuite):
    """Experts take the first positions of those with equal scores, whichever rank has them."""

    waits = {"experts.py": 8}
    layouts = ("cp2",)

    def parity_changes(self, folder):
        with validators.disabled():  # initial weights of zero, which a job cannot have: all scores are equal
            router = MoMa(experts=GROUPS, choose="experts", init_std=0.0, capacity_factor=0.5)
        return {"model": Marked(language=language_of(router)), "data": {"sources": (Mixed(),)}}
