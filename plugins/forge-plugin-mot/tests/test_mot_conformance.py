"""Fusion `mot` keeps the contract of fusions, and has one curve under every layout."""

from __future__ import annotations

from forge_plugin_mot import MixtureOfTransformers
from forge_plugin_vision import VisionLanguage
from forge_testing.suites.vision import VisionModelSuite
from forge_testing.vision import tiny_language, tiny_vision


class TestMixtureOfTransformers(VisionModelSuite):
    component = VisionLanguage(language=tiny_language(), vision=tiny_vision(), fusion=MixtureOfTransformers())
    layouts = ("replicate2", "tp2", "pp2", "cp2", "checkpointing2")
