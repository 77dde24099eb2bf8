"""Towers for images of any size, and adapters that pool, keep the contract of fusions."""

from __future__ import annotations

import pytest

from forge_core.contracts.errors import JobError
from forge_plugin_vision import AttentionPool, AveragePool, Joint, PixelShuffle, VisionLanguage, VisionPart, ViT
from forge_plugin_vision.kinds import format_for, grid_problems
from forge_plugin_vision.suite import VisionModelSuite
from forge_plugin_vision.testing import tiny_language

TOWER = {"dim": 16, "layers": 2, "heads": 2, "patch": 2, "size": (6, 6)}


class TestAnySize(VisionModelSuite):
    component = VisionLanguage(
        language=tiny_language(),
        vision=VisionPart(
            encoder=ViT(**TOWER, position_interpolation="bicubic", class_token=True, pre_norm=True, norm=False),
            adapter=AttentionPool(window=2, heads=2, ragged=True, hidden=8),
            images_per_sequence=2,
            patches_per_sequence=14,
        ),
        fusion=Joint(),
    )
    layouts = ("fsdp2", "compiled")


@pytest.mark.parametrize(
    ("encoder", "key", "message"),
    [
        (ViT(**{**TOWER, "heads": 3}), "heads", "3 does not divide dim, which is 16"),
        (ViT(**{**TOWER, "size": (6, 7)}), "size", "[6, 7] is not divisible by patch, which is 2"),
        (
            ViT(**TOWER, pixels=(6, 8)),
            "pixels",
            "[6, 8] has room for other patches than size, which is [6, 6]; it is less than one patch larger",
        ),
        (
            ViT(**TOWER, pixels=(7, 7), position_interpolation="bicubic"),
            "pixels",
            'it is for images of one size; leave it out, or set position_interpolation = "none"',
        ),
        (ViT(**TOWER, select_layer=-3), "select_layer", "-3 leaves none of 2 layers; take -1"),
        (ViT(**TOWER, std=(1, 0, 1)), "std", "[1, 0, 1] must be above 0, since pixels are divided by it"),
    ],
)
def test_wrong_keys_are_named(make_job, encoder, key, message):
    (problem,) = encoder.problems(make_job(), None)
    assert (problem.path, problem.message) == (key, message)


def test_a_block_that_is_not_built_cannot_be_tapped(context):
    with pytest.raises(JobError, match="uses the output of block 1, and there are 1 from 0"):
        ViT(**TOWER, select_layer=-2).build(context, taps=[1])


def test_heads_must_divide_the_encoders_width(context):
    with pytest.raises(JobError, match=r"heads: 5 does not divide the encoder's width, which is 16"):
        AttentionPool(heads=5).build(context, width=16, dim=8)


def test_images_of_one_size_must_suit_the_adapter():
    tower, unsuited, suited = ViT(**TOWER), PixelShuffle(factor=2), AveragePool(window=2, ragged=True)
    assert next(iter(grid_problems(format_for(tower, unsuited), tower, unsuited))).path == "adapter"
    assert not list(grid_problems(format_for(tower, suited), tower, suited))
