"""The encoder `qwen_vit` and the adapter `merger`, as in Qwen2.5-VL (Bai et al. 2025), Qwen3-VL and Kimi-K2.5."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import deep_iterable, ge, gt

from forge_core.contracts.components import when_resumed
from forge_core.contracts.errors import Problem
from forge_kit.optim.fields import DEPTH
from forge_plugin_vision.kinds import AdapterComponent, Grid, ImageFormat, VisionEncoderComponent

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_vision.modules.qwen_vit import QwenBlock

Norm = Literal["rmsnorm", "layernorm"]


def _norm(kind: Norm, width: int, eps: float) -> nn.Module:
    from forge_plugin_transformer.modules.norms import CentredNorm, RootMeanSquareNorm

    return RootMeanSquareNorm(width, eps=eps) if kind == "rmsnorm" else CentredNorm(width, eps=eps, bias=True)


@frozen(kw_only=True)
class QwenViT(VisionEncoderComponent):
    """Vision transformer for images and videos of any size, with rotary encoding of rows and columns.

    A patch sees the patches of its frame; in blocks with windows, the patches of its window. The tower of Qwen2.5-VL
    has `window = 112` and `full_attention = [7, 15, 23, 31]`; the tower of Qwen3-VL has `patch = 16`,
    `norm = "layernorm"`, `ffn = "gelu"`, `patch_bias = true` and `table = 48`; Pixtral's (Agrawal et al. 2024) has
    `frames = 1`, `bias = false`, `pre_norm = true` and `rates_in_turns = true`; the tower of Kimi-K2.5 (Kimi Team
    2026) has `frames = 1`, `norm = "layernorm"`, `ffn = "gelu"`, `patch_bias = true`, `table = 64`, `last_norm = true`,
    `table_interpolation = "bicubic"` and `clips = false`.
    """

    dim: int = field(default=1280, validator=gt(0))
    """Width W."""
    layers: int = field(default=32, validator=DEPTH)
    """Number of blocks."""
    heads: int = field(default=16, validator=gt(0))
    """Attention heads; their width, `dim / heads`, is a multiple of 4."""
    hidden: int = field(default=0, validator=ge(0))
    """Width between the matrices of the feed-forward part; 0: 8/3 of `dim` with a gate, 4 times `dim` for `gelu`."""
    patch: int = field(default=14, validator=gt(0))
    """Side of a patch in pixels."""
    frames: int = field(default=2, validator=gt(0))
    """Frames of a patch; a still image is repeated that often."""
    norm: Norm = "rmsnorm"
    """Normalisation before attention and before the feed-forward part."""
    ffn: Literal["swiglu", "geglu", "gelu"] = "swiglu"
    """down(silu(gate(x)) * up(x)), down(gelu(gate(x)) * up(x)), or down(gelu(up(x))) with the tanh approximation."""
    bias: bool = True
    """Whether the matrices of the blocks have biases."""
    pre_norm: bool = False
    """Whether patches are normalised before the first block."""
    last_norm: bool = False
    """Whether the output of the last block is normalised. Outputs of other blocks, as for `deepstack`, are not."""
    patch_bias: bool = False
    """Whether the projection of patches has a bias."""
    table: int = field(default=0, validator=ge(0))
    """Side of a square table of learned positions, interpolated to each image's grid; 0: none."""
    table_interpolation: Literal["aligned", "bicubic"] = "aligned"
    """How the table is interpolated: bilinear, the table's ends on the image's ends, or bicubic (Kimi-K2.5)."""
    window: int = field(default=0, validator=ge(0))
    """Side of the windows of attention in pixels, a multiple of `patch`; 0: none."""
    full_attention: tuple[int, ...] = field(default=(), validator=deep_iterable(ge(0)))
    """Numbers of the blocks, from 0, that have no windows where others have."""
    theta: float = field(default=10000.0, validator=gt(1))
    """Base of the wavelengths of the rotary encoding."""
    rates_in_turns: bool = False
    """Whether the first frequency is for rows, the next one for columns, and so on. Otherwise both have the same."""
    eps: float = field(default=1e-6, validator=gt(0), metadata=when_resumed("flag"))
    """Added to the variance or mean square in norms."""
    clips: bool = True
    """Whether videos are allowed, each frame of which is seen by itself. In Kimi-K2.5's tower frames see each other and
    their features are averaged, which is missing: a job with videos is refused with `false`."""
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    """Subtracted from red, green and blue, as a share of 255; Qwen3-VL: 0.5 each."""
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    """Divides them afterwards; Qwen3-VL: 0.5 each."""
    init_std: float = field(default=0.02, validator=gt(0), metadata=when_resumed("safe"))
    """Standard deviation of initial matrices; those that write into the residual stream have it / sqrt(2 layers)."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Yields widths and sides that do not divide, and numbers of blocks that have no meaning."""
        if self.dim % self.heads:
            yield Problem("heads", f"{self.heads} does not divide dim, which is {self.dim}")
        elif self.dim // self.heads % 4:
            message = f"dim / heads = {self.dim // self.heads} is no multiple of 4; rows and columns pair dimensions"
            yield Problem("heads", message)
        if self.window % self.patch:
            yield Problem("window", f"{self.window} is no multiple of patch, which is {self.patch}")
        if not self.table and self.table_interpolation != "aligned":
            yield Problem(
                "table_interpolation", f"{self.table_interpolation!r} has no meaning without a table; set table"
            )
        if min(self.std) <= 0:
            yield Problem("std", f"{list(self.std)} must be above 0, since pixels are divided by it")
        if not self.window and self.full_attention:
            message = f"{list(self.full_attention)} has no meaning without windows; set window, or leave it out"
            yield Problem("full_attention", message)
        elif any(number >= self.layers for number in self.full_attention):
            message = f"{list(self.full_attention)} names blocks that do not exist: there are {self.layers}, from 0"
            yield Problem("full_attention", message)

    def image_format(self) -> ImageFormat:
        """Returns a format for images and videos of any size."""
        return ImageFormat(patch=self.patch, frames=self.frames, mean=self.mean, std=self.std, clips=self.clips)

    def build(self, context: BuildContext, taps: Sequence[int]) -> nn.Module:
        """Build the tower; `window` is converted to patches, and a position table is made only if `table` is set."""
        from forge_kit.nn.modules import Linear
        from forge_plugin_vision.modules.axial_rotary import AxialRotary
        from forge_plugin_vision.modules.positions import PositionTable
        from forge_plugin_vision.modules.qwen_vit import QwenVisionTransformer

        grid, width = (self.table, self.table), self.dim
        interpolation = self.table_interpolation
        table = PositionTable(grid, width, interpolation=interpolation, class_token=False, std=self.init_std)
        return QwenVisionTransformer(
            [self._block() for _ in range(self.layers)],
            patch=Linear(self.image_format().values, self.dim, bias=self.patch_bias, std=self.init_std),
            table=table if self.table else None,
            rotary=AxialRotary(self.dim // self.heads, self.theta, in_turns=self.rates_in_turns),
            pre_norm=_norm(self.norm, self.dim, self.eps) if self.pre_norm else None,
            last_norm=_norm(self.norm, self.dim, self.eps) if self.last_norm else None,
            window=self.window // self.patch,
            full_attention=self.full_attention,
            taps=taps,
        )

    def _block(self) -> QwenBlock:
        from forge_plugin_transformer.kinds import InitStd
        from forge_plugin_transformer.layer_parts import default_hidden
        from forge_plugin_transformer.modules.feed_forward import (
            GatedFeedForward,
            GELUGatedFeedForward,
            PlainFeedForward,
        )
        from forge_plugin_vision.modules.qwen_vit import QwenBlock

        # Each block writes to the residual stream twice, and its variance should not grow with the depth.
        init = InitStd(self.init_std, self.init_std / math.sqrt(2 * self.layers))
        ffn: nn.Module
        gated, bias = self.hidden or default_hidden(self.dim), self.bias
        if self.ffn == "swiglu":
            ffn = GatedFeedForward(self.dim, gated, bias=bias, init=init)
        elif self.ffn == "geglu":
            ffn = GELUGatedFeedForward(self.dim, gated, bias=bias, approximate="none", init=init)
        else:
            ffn = PlainFeedForward(self.dim, self.hidden or 4 * self.dim, bias=bias, approximate="tanh", init=init)
        return QwenBlock(
            self.dim,
            self.heads,
            norm=lambda: _norm(self.norm, self.dim, self.eps),  # a block has two
            ffn=ffn,
            bias=bias,
            residual=init.residual,
            std=init.inner,
        )


@frozen(kw_only=True)
class Merger(AdapterComponent):
    """down(gelu(up(the patches of a square block, one after the other))); each block is a position (Qwen2-VL)."""

    merge: int = field(default=2, validator=gt(0))
    """Patches along each side of a block; an image's rows and columns of patches are multiples of it."""
    hidden: int = field(default=0, validator=ge(0))
    """Width between the matrices; 0: the width of a block, `merge`² times the encoder's."""
    norm: Norm = "rmsnorm"
    """Normalisation before; Qwen3-VL: `layernorm`."""
    norm_over: Literal["patch", "block"] = "patch"
    """Whether each patch is normalised, or the whole block (Qwen3-VL's mergers of DeepStack)."""
    joined: bool = False
    """Whether a matrix without bias first takes a block to the encoder's width: down(gelu(up(join(block)))), as in
    Mistral 3. Its columns are the block's first feature in each patch, then the second feature, and so on."""
    bias: bool = True
    """Whether the other two matrices have biases."""
    eps: float = field(default=1e-6, validator=gt(0), metadata=when_resumed("flag"))
    """Added to the variance or mean square in the norm."""
    init_std: float = field(default=0.02, validator=gt(0), metadata=when_resumed("safe"))
    """Standard deviation of initial matrices."""

    @property
    def multiple(self) -> int:
        """The side of a block, so that no block is cut by an image's edge."""
        return self.merge

    def positions(self, grid: Grid) -> int:
        """Returns one position for each block, at each entry of the time axis."""
        return grid.frames * (grid.rows // self.merge) * (grid.columns // self.merge)

    def build(self, context: BuildContext, width: int, dim: int) -> nn.Module:
        """Build it; the norm has the width of a patch or of a block, by `norm_over`."""
        from forge_plugin_vision.modules.merger import Merger

        block = self.merge**2 * width
        return Merger(
            width,
            self.hidden or block,
            dim,
            side=self.merge,
            norm=_norm(self.norm, block if self.norm_over == "block" else width, self.eps),
            norm_over=self.norm_over,
            joined=self.joined,
            bias=self.bias,
            std=self.init_std,
        )
