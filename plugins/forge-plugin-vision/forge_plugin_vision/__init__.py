"""Vision-language models: an image encoder, an adapter and a fusion around any language model.

The subpackage `features` keeps the features of a frozen encoder on disk.
"""

from forge_plugin_vision.adapters import AttentionPool, AveragePool, LinearAdapter, MLPAdapter, Perceiver, PixelShuffle
from forge_plugin_vision.any_resolution import AnyResolution
from forge_plugin_vision.encoders import ViT
from forge_plugin_vision.gemma import GemmaViT, ScaledPool
from forge_plugin_vision.kinds import (
    BROKEN,
    GRIDS,
    IMAGE,
    PATCHES,
    SECONDS,
    SOUND,
    VIDEO,
    AdapterComponent,
    FusionComponent,
    Grid,
    HasImageInput,
    ImageFormat,
    ImageInput,
    VisionEncoderComponent,
    image_input,
)
from forge_plugin_vision.mrope import MultimodalRope
from forge_plugin_vision.qwen import Merger, QwenViT
from forge_plugin_vision.tiled_vit import TiledViT
from forge_plugin_vision.vision import Joint, TowerPart, VisionLanguage, VisionPart, VisionTower

__all__ = [
    "BROKEN",
    "GRIDS",
    "IMAGE",
    "PATCHES",
    "SECONDS",
    "SOUND",
    "VIDEO",
    "AdapterComponent",
    "AnyResolution",
    "AttentionPool",
    "AveragePool",
    "FusionComponent",
    "GemmaViT",
    "Grid",
    "HasImageInput",
    "ImageFormat",
    "ImageInput",
    "Joint",
    "LinearAdapter",
    "MLPAdapter",
    "Merger",
    "MultimodalRope",
    "Perceiver",
    "PixelShuffle",
    "QwenViT",
    "ScaledPool",
    "TiledViT",
    "TowerPart",
    "ViT",
    "VisionEncoderComponent",
    "VisionLanguage",
    "VisionPart",
    "VisionTower",
    "image_input",
]
