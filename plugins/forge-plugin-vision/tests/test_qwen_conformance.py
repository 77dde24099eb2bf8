"""Windows, `merger`, `mrope` and DeepStack together keep the contract of fusions, with one curve under every layout."""

from __future__ import annotations

from qwen_models import MODEL

from forge_plugin_vision.suite import VisionModelSuite


class TestQwen(VisionModelSuite):
    component = MODEL
