"""Towers for images of any size, and adapters that pool, keep the contract of fusions."""

from __future__ import annotations

import pytest

from forge_plugin_vision import AttentionPool, AveragePool, Joint, PixelShuffle, VisionLanguage, VisionPart, ViT
from forge_plugin_vision.kinds import format_for, grid_problems
from forge_testing.refusals import at, check_problems, refuses
from forge_testing.suites.vision import VisionModelSuite
from forge_testing.vision import tiny_language

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
    layouts = ("fsdp2", "traced")


@pytest.mark.parametrize(
    ("encoder", "expected"),
    [
        (ViT(**{**TOWER, "heads": 3}), at("heads", 3, 16)),
        (ViT(**{**TOWER, "size": (6, 7)}), at("size", "[6, 7]", "patch", 2)),
        (ViT(**TOWER, pixels=(6, 8)), at("pixels", "[6, 8]", "[6, 6]")),
        (
            ViT(**TOWER, pixels=(7, 7), position_interpolation="bicubic"),
            at("pixels", 'position_interpolation = "none"'),
        ),
        (ViT(**TOWER, select_layer=-3), at("select_layer", -3, "2 layers", -1)),
        (ViT(**TOWER, std=(1, 0, 1)), at("std", "[1, 0, 1]", "above 0")),
    ],
)
def test_wrong_keys_are_named(make_job, encoder, expected):
    check_problems(encoder.problems(make_job(), None), expected)


def test_a_block_that_is_not_built_cannot_be_tapped(context):
    with refuses("", "block 1", "1 from 0"):
        ViT(**TOWER, select_layer=-2).build(context, taps=[1])


def test_heads_must_divide_the_encoders_width(context):
    with refuses(".heads", 5, 16):
        AttentionPool(heads=5).build(context, width=16, dim=8)


def test_images_of_one_size_must_suit_the_adapter():
    tower, unsuited, suited = ViT(**TOWER), PixelShuffle(factor=2), AveragePool(window=2, ragged=True)
    assert next(iter(grid_problems(format_for(tower, unsuited), tower, unsuited))).path == "adapter"
    assert not list(grid_problems(format_for(tower, suited), tower, suited))
