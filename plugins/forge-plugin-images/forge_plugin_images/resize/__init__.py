"""How images get their size: the kind `resize` and its types.

`kinds` has the contract, `any_size` and `one_size` make one image of an image, `tiles` several, and `joined` one of
several tiles; `auto` chooses among them by the encoder.
"""

from forge_plugin_images.resize.any_size import BudgetResize, FillResize, LongestResize, NativeResize, TopLeftResize
from forge_plugin_images.resize.auto import AutoResize
from forge_plugin_images.resize.joined import AnyResolutionResize, CanvasResize
from forge_plugin_images.resize.kinds import ResizeComponent, Resizer, TileResizer
from forge_plugin_images.resize.one_size import CropResize, PadResize, StretchResize
from forge_plugin_images.resize.tiles import AspectResize, CanvasTilesResize, SplitResize, TilesResize

__all__ = [
    "AnyResolutionResize",
    "AspectResize",
    "AutoResize",
    "BudgetResize",
    "CanvasResize",
    "CanvasTilesResize",
    "CropResize",
    "FillResize",
    "LongestResize",
    "NativeResize",
    "PadResize",
    "ResizeComponent",
    "Resizer",
    "SplitResize",
    "StretchResize",
    "TileResizer",
    "TilesResize",
    "TopLeftResize",
]
