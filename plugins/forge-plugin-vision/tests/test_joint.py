"""Fusion `joint` keeps the contract of fusions."""

from __future__ import annotations

import attrs
import torch

from forge_core.parallel.initialise import materialise
from forge_plugin_transformer import GEGLU, GroupedQueryAttention, RMSNorm
from forge_plugin_vision import GRIDS, IMAGE, PATCHES, Joint, VisionLanguage
from forge_plugin_vision.suite import VisionModelSuite
from forge_plugin_vision.testing import tiny_language, tiny_vision


class TestJoint(VisionModelSuite):
    component = VisionLanguage(language=tiny_language(), vision=tiny_vision(), fusion=Joint())


LIKE_GEMMA = attrs.evolve(
    tiny_language(), norm_placement="both", norm=RMSNorm(offset=1), ffn=GEGLU(hidden=32), embedding_scale=4.0,
    logit_soft_cap=5.0, learned_positions=64, attention=GroupedQueryAttention(heads=4, kv_heads=2, qk_norm="all"),
)  # fmt: skip


class TestJointWithOtherBlocks(VisionModelSuite):
    component = VisionLanguage(language=LIKE_GEMMA, vision=tiny_vision(), fusion=Joint())
    layouts = ("tp2", "pp2")


def test_factors_on_embeddings_are_of_tokens_alone(make_job, build):
    language = attrs.evolve(tiny_language(), embedding_scale=4.0)
    component = VisionLanguage(language=language, vision=tiny_vision(), fusion=Joint())
    model = build(make_job(model=component, seq_len=8)).model
    materialise(model, torch.device("cpu"), seed=0)
    ids, grids = torch.tensor([[3, *[IMAGE] * 4, 7, 1, 2]]), torch.tensor([[[1, 2, 2]]])
    batch = {"input_ids": ids, PATCHES: torch.full((1, 4, 12), 200, dtype=torch.uint8), GRIDS: grids}
    prepared = model.prepare(batch)
    (x,), features = model.embed(prepared), model.vision(prepared)
    expected = torch.where((ids < 0)[..., None], features, 4 * model.embedding.weight[ids.clamp(min=0)])
    torch.testing.assert_close(x, expected)
