"""`moma` keeps the contract of routers."""

from __future__ import annotations

from forge_plugin_moe import MoE
from forge_plugin_moma import MoMa
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_plugin_vision import Joint, VisionLanguage
from forge_testing.suites import RouterSuite
from forge_testing.suites.vision import VisionModelSuite
from forge_testing.vision import tiny_vision

GROUPS = {"text": 4, "image": 3, "video": 1}


class TestTokensChoose(RouterSuite):
    component = MoMa(experts=GROUPS, z_loss=10.0, sequence_balance=10.0, batch_balance=10.0, bias_rate=0.1)


class TestTokensChooseSeveral(RouterSuite):
    component = MoMa(experts={"image": 4, "text": 4}, top_k=3, normalise=True, gumbel_noise=True)


class TestExpertsChoose(RouterSuite):
    component = MoMa(experts=GROUPS, choose="experts", z_loss=10.0)


class TestExpertsChooseSeveral(RouterSuite):
    component = MoMa(experts={"text": 6, "image": 2}, choose="experts", capacity_factor=1.5, gumbel_noise=True)


class TestImagesWithExpertsOfTheirOwn(VisionModelSuite):
    """Fusion `joint`; `test_moma_parity` has its layouts."""

    waits = {"experts.py": 6}
    component = VisionLanguage(
        language=Transformer(
            vocab_size=32,
            dim=16,
            layers=2,
            attention=GroupedQueryAttention(heads=4, kv_heads=2),
            ffn=MoE(experts=4, hidden=16, router=MoMa(experts={"text": 2, "image": 2}, init_std=0.5)),
        ),
        vision=tiny_vision(),
        fusion=Joint(),
    )
    rounding = 1e-12
    layouts = ("fsdp2",)
