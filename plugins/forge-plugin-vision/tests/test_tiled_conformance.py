"""Features that are not one a patch keep the contract of fusions, with one curve under every layout."""

from __future__ import annotations

from forge_plugin_vision import Joint, MLPAdapter, TiledViT, VisionLanguage, VisionPart
from forge_plugin_vision.suite import VisionModelSuite
from forge_plugin_vision.testing import tiny_language


class TestTiledVitAndJoint(VisionModelSuite):
    """Images of one to four tiles of one patch, each with a class token."""

    component = VisionLanguage(
        language=tiny_language(),
        vision=VisionPart(
            encoder=TiledViT(
                dim=16, layers=2, global_layers=1, heads=2, hidden=24, patch=2, tile=2,
                arrangements=((1, 1), (1, 2), (2, 2)), intermediate=(1,), gate_start=0.5,
            ),
            adapter=MLPAdapter(hidden=8),
            images_per_sequence=2,
        ),
        fusion=Joint(),
    )  # fmt: skip
    layouts = ("fsdp2", "tp2", "pp2", "cp2", "checkpointing2")  # copies of whole models are the subject of `TestJoint`
