"""Windows, `merger`, `mrope` and DeepStack together keep the contract of fusions, with one curve under every layout.

Rows have images and videos.
"""

from __future__ import annotations

from qwen_models import MODEL

from forge_plugin_vision.suite import VisionModelSuite
from forge_plugin_vision.testing import RandomImages


class TestQwen(VisionModelSuite):
    component = MODEL
    images = RandomImages(text_only=2, held_out=5, video_every=2)
    layouts = ("fsdp2", "tp2", "pp2", "cp2", "checkpointing2")  # copies of whole models are the subject of `TestJoint`
