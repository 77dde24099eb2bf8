"""Tiles that are joined keep the contract of fusions, with one curve under every layout."""

from __future__ import annotations

from forge_plugin_vision import AnyResolution, Joint, VisionLanguage, VisionPart, ViT
from forge_testing.suites.vision import VisionModelSuite
from forge_testing.vision import tiny_language


class TestAnyResolutionAndJoint(VisionModelSuite):
    """Images of two to six tiles of one patch, of which the larger are shrunk, or of one tile."""

    component = VisionLanguage(
        language=tiny_language(),
        vision=VisionPart(
            encoder=ViT(dim=16, layers=1, heads=2, patch=2, size=(2, 2)),
            adapter=AnyResolution(arrangements=((1, 2), (2, 2), (2, 3)), max_feature_tiles=3, frame_pool=2, hidden=8),
            images_per_sequence=2,
        ),
        fusion=Joint(),
    )
    layouts = ("tp2", "checkpointing2")  # the others: `TestJoint`
