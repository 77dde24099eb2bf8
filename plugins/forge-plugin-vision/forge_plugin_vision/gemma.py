"""The encoder `gemma_vit` and the adapter `scaled_pool`, as in Gemma 4."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, gt

from forge_core.contracts.components import when_resumed
from forge_core.contracts.errors import Problem
from forge_kit.optim.fields import DEPTH
from forge_plugin_vision.kinds import AdapterComponent, Grid, ImageFormat, VisionEncoderComponent, image_input

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


@frozen(kw_only=True)
class GemmaViT(VisionEncoderComponent):
    """Gemma 4's tower: images of any size, with a table of columns and one of rows and a rotary encoding.

    Each block has norms before and after attention and feed-forward part. Queries and keys are normalised with gains,
    values without; scores have no factor. The defaults are from its class in `transformers`, and fit E2B and E4B but
    for `clipped`; the tower of 26B-A4B has `dim = 1152`, `layers = 27`, `heads = 16`, `head_dim = 72`, `hidden = 4304`.
    """

    dim: int = field(default=768, validator=gt(0))
    """Width W."""
    layers: int = field(default=16, validator=DEPTH)
    """Number of blocks."""
    heads: int = field(default=12, validator=gt(0))
    """Attention heads."""
    head_dim: int = field(default=64, validator=gt(0))
    """Width of a head, a multiple of 4."""
    hidden: int = field(default=3072, validator=gt(0))
    """Width between the matrices of the feed-forward part, down(gelu(gate(x)) * up(x))."""
    patch: int = field(default=16, validator=gt(0))
    """Side of a patch in pixels."""
    positions: int = field(default=10240, validator=gt(0))
    """Learned vectors of columns, and of rows: as many as an image has of either at most."""
    theta: float = field(default=100.0, validator=gt(1))
    """Base of the wavelengths of the rotary encoding: half of a head is for columns, half for rows."""
    eps: float = field(default=1e-6, validator=gt(0), metadata=when_resumed("flag"))
    """Added to the mean square in norms."""
    clipped: bool = False
    """Whether each matrix of a block clips its inputs and outputs (Gemma 4 E2B and E4B). The bounds of a matrix are in
    checkpoints and are not trained; the initial ones are infinite."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Subtracted from red, green and blue, as a share of 255."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Divides them afterwards."""
    init_std: float = field(default=0.02, validator=gt(0), metadata=when_resumed("safe"))
    """Standard deviation of initial matrices; those that write into the residual stream have it / sqrt(2 layers)."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Yields a width of heads that columns and rows cannot share, and images that may have too many of either."""
        if self.head_dim % 4:
            yield Problem("head_dim", f"{self.head_dim} is no multiple of 4; columns and rows pair dimensions")
        if min(self.std) <= 0:
            yield Problem("std", f"{list(self.std)} must be above 0, since pixels are divided by it")
        seen = image_input(job)
        if (longest := seen.patches_per_sequence // seen.format.multiple) > self.positions:
            message = f"{self.positions}, and with model.vision.patches_per_sequence = {seen.patches_per_sequence}"
            yield Problem("positions", f"{message} an image may have {longest} columns; raise it")

    def image_format(self) -> ImageFormat:
        """Returns a format for images and frames of any size."""
        return ImageFormat(patch=self.patch, mean=self.mean, std=self.std)

    def build(self, context: BuildContext, taps: Sequence[int]) -> nn.Module:
        """Build the tower."""
        from forge_kit.nn.modules import Linear
        from forge_plugin_transformer.kinds import InitStd
        from forge_plugin_vision.modules.axial_rotary import ApartRotary
        from forge_plugin_vision.modules.gemma_vit import GemmaBlock
        from forge_plugin_vision.modules.positions import AxisTables
        from forge_plugin_vision.modules.qwen_vit import QwenVisionTransformer

        # Each block writes to the residual stream twice, and its variance should not grow with the depth.
        init = InitStd(self.init_std, self.init_std / math.sqrt(2 * self.layers))
        sizes = {"heads": self.heads, "head_dim": self.head_dim, "hidden": self.hidden}
        return QwenVisionTransformer(
            [GemmaBlock(self.dim, **sizes, eps=self.eps, init=init, clipped=self.clipped) for _ in range(self.layers)],
            patch=Linear(self.image_format().values, self.dim, bias=False, std=self.init_std),
            table=AxisTables(self.positions, self.dim, std=self.init_std),
            rotary=ApartRotary(self.head_dim, self.theta),
            pre_norm=None,
            last_norm=None,
            window=0,
            full_attention=(),
            taps=taps,
        )


@frozen(kw_only=True)
class ScaledPool(AdapterComponent):
    """One matrix on the normalised mean of each window of features, times the root of their width (Gemma 4)."""

    window: int = field(default=3, validator=gt(0))
    """Rows and columns of patches that become one position; sizes of images in patches are multiples of it."""
    standardise: bool = False
    """Whether a learned vector is subtracted before the norm, and another one a factor, as in Gemma 4's larger models.
    `transformers` trains neither."""
    eps: float = field(default=1e-6, validator=ge(0), metadata=when_resumed("flag"))
    """Added to the mean square in the norm, which has no gain."""

    @property
    def multiple(self) -> int:
        """The side of a window, so that none is cut by an image's edge."""
        return self.window

    def positions(self, grid: Grid) -> int:
        """Returns one position for each window of a frame."""
        return grid.frames * (grid.rows // self.window) * (grid.columns // self.window)

    def build(self, context: BuildContext, width: int, dim: int) -> nn.Module:
        """Build it."""
        from forge_plugin_vision.modules.gemma_vit import ScaledWindows

        return ScaledWindows(width, dim, side=self.window, standardise=self.standardise, eps=self.eps)
