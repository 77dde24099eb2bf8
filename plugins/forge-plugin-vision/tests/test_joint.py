"""Fusion `joint` keeps the contract of fusions."""

from __future__ import annotations

import attrs
import pytest
import torch

from forge_core.parallel.initialise import materialise
from forge_plugin_transformer import GEGLU, GroupedQueryAttention, HyperConnections, RMSNorm
from forge_plugin_vision import GRIDS, IMAGE, PATCHES, Joint, VisionLanguage
from forge_plugin_vision.modules.grafting import embedding_width
from forge_testing.refusals import refuses
from forge_testing.suites.vision import VisionModelSuite
from forge_testing.vision import tiny_language, tiny_vision


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


def test_images_are_refused_where_the_language_model_has_several_streams(make_job, build):
    def component(streams):
        language = attrs.evolve(tiny_language(), residual_connection=HyperConnections(streams=streams))
        return VisionLanguage(language=language, vision=tiny_vision(), fusion=Joint())

    with refuses("model.language.residual_connection", "2 residual streams", '"add"'):
        build(make_job(model=component(2), seq_len=8))
    assert build(make_job(model=component(1), seq_len=8)).model.streams == 1


def test_the_suite_refuses_a_model_that_is_blind_in_one_row_of_the_batch(tmp_path):
    class Blind(VisionModelSuite):
        component = TestJoint.component

        def _model(self, *args, **keys):
            model = super()._model(*args, **keys)
            rows = torch.tensor([1.0, 0, 1, 1])[:, None, None]  # the second has an image
            model.register_forward_hook(lambda module, inputs, hidden: hidden * rows)
            return model

    with pytest.raises(AssertionError):
        Blind().test_the_first_token_after_an_image_is_learned_from_it(tmp_path)


@pytest.mark.parametrize(
    "embedding", [None, torch.ones(5, 4), torch.nn.LayerNorm(4)], ids=["none", "tensor", "no table"]
)
def test_a_language_model_without_a_table_of_tokens_is_refused(embedding):
    model = torch.nn.Module()
    model.embedding = embedding
    with refuses("model.language", "Module", "embedding", "weight"):
        embedding_width(model)
