"""Fusion `joint` keeps the contract of fusions."""

from __future__ import annotations

from forge_plugin_vision import Joint, VisionLanguage
from forge_plugin_vision.suite import VisionModelSuite
from forge_plugin_vision.testing import tiny_language, tiny_vision
from forge_testing.distribution import check_distribution


def test_the_distribution():
    vision = {"vision": {"encoder": {"type": "vit"}}}
    check_distribution("forge-plugin-vision", samples={"vision_language": vision})


class TestJoint(VisionModelSuite):
    component = VisionLanguage(language=tiny_language(), vision=tiny_vision(), fusion=Joint())
