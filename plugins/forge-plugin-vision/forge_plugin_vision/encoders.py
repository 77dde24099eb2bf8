"""The encoder `vit`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import ge, gt, lt

from forge_core.contracts.errors import JobError, Problem
from forge_kit.optim.fields import DEPTH
from forge_plugin_vision.kinds import ImageFormat, VisionEncoderComponent

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


@frozen(kw_only=True)
class ViT(VisionEncoderComponent):
    """Vision transformer (Dosovitskiy et al. 2021); by its keys that of SigLIP, SigLIP 2, CLIP or Llama 4.

    The defaults are SigLIP's base model of 224 x 224 pixels (Zhai et al. 2023).
    """

    dim: int = field(default=768, validator=gt(0))
    """Width W."""
    layers: int = field(default=12, validator=DEPTH)
    """Number of blocks."""
    heads: int = field(default=12, validator=gt(0))
    """Attention heads, a divisor of `dim`."""
    hidden: int = field(default=0, validator=ge(0))
    """Width between the matrices of the feed-forward part; 0: 4 times `dim`."""
    patch: int = field(default=16, validator=gt(0))
    """Side of a patch in pixels."""
    size: tuple[int, int] = (224, 224)
    """Height and width in pixels that the position table is for, multiples of `patch`."""
    pixels: tuple[int, int] | None = None
    """Height and width that images are resized to, if they are not multiples of `patch`. The encoder does not see
    the pixels beyond `size`, at the bottom and right. SigLIP so400m has patches of 14, `size = [378, 378]`,
    `pixels = [384, 384]`."""
    position_interpolation: Literal["none", "bilinear", "bicubic", "nearest"] = "none"
    """Fits the table to images of other sizes: `bilinear` with antialias (SigLIP 2 NaFlex), `bicubic` (ViT, CLIP and
    SigLIP in `transformers`), `nearest` (Idefics3, SmolVLM). none: every image has `size`."""
    activation: Literal["gelu", "gelu_tanh", "quick_gelu"] = "gelu_tanh"
    """Between the matrices of the feed-forward part; `quick_gelu` is CLIP's."""
    class_token: bool = False
    """Whether a learned token joins each image, as in CLIP; it is no feature."""
    pre_norm: bool = False
    """Whether a norm comes before the blocks, as in CLIP."""
    patch_bias: bool = True
    """Whether the projection of patches has a bias; CLIP's has none."""
    block_norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation within the blocks; `rmsnorm` in InternVL's largest."""
    qk_norm: bool = False
    """Whether queries and keys are normalised (root mean square), all heads together, as in InternVL's largest."""
    attention_bias: bool = True
    """Whether the projections to queries, keys and values have biases."""
    rotary_theta: float = field(default=0.0, validator=ge(0))
    """Base of a rotary encoding of columns and rows in addition to the table, from 1 on, as in Llama 4, which has
    10000; 0: none."""
    layer_scale: float = field(default=0.0, validator=ge(0))
    """Initial value of a learned factor of each channel of what a block adds; 0: there is none. InternVL: 0.1."""
    norm: bool = True
    """Whether a norm comes after the blocks; LLaVA takes CLIP's features without."""
    select_layer: int = field(default=-1, validator=lt(0))
    """The block whose output the features are, from the end: -1 the last, -2 the one before it (LLaVA). Those after it
    are not built."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Subtracted from red, green and blue, as a share of 255; CLIP's are 0.48145466, 0.4578275, 0.40821073."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Divides them afterwards; CLIP's are 0.26862954, 0.26130258, 0.27577711."""
    resample: Literal["bilinear", "bicubic", "lanczos"] = "bicubic"
    """How images are resized: `bilinear` for SigLIP 2 NaFlex, `lanczos` for Idefics3 and SmolVLM."""
    eps: float = field(default=1e-6, validator=gt(0))
    """Added to the variance in norms; 1e-5 in CLIP."""
    init_std: float = field(default=0.02, validator=gt(0))
    """Standard deviation of initial matrices."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Yields sides and widths that do not divide, and values that leave no block or divide by 0."""
        if self.dim % self.heads:
            yield Problem("heads", f"{self.heads} does not divide dim, which is {self.dim}")
        elif self.rotary_theta and self.dim // self.heads % 4:
            message = f"dim / heads = {self.dim // self.heads} is no multiple of 4"
            yield Problem("heads", f"{message}; with rotary_theta, rows and columns pair dimensions")
        if 0 < self.rotary_theta <= 1:
            yield Problem("rotary_theta", f"{self.rotary_theta} is not above 1; take 10000, or 0 for no such encoding")
        if any(side % self.patch or side <= 0 for side in self.size):
            yield Problem("size", f"{list(self.size)} is not divisible by patch, which is {self.patch}")
        if self.pixels is not None:
            yield from self._pixel_problems(self.pixels)
        if self.blocks < 1:
            yield Problem("select_layer", f"{self.select_layer} leaves none of {self.layers} layers; take -1")
        if min(self.std) <= 0:
            yield Problem("std", f"{list(self.std)} must be above 0, since pixels are divided by it")

    def _pixel_problems(self, pixels: tuple[int, int]) -> Iterable[Problem]:
        if self.position_interpolation != "none":
            yield Problem(
                "pixels", 'it is for images of one size; leave it out, or set position_interpolation = "none"'
            )
        # The grid has whole patches of `pixels`: one more patch would not be in the table.
        if any(not size <= side < size + self.patch for side, size in zip(pixels, self.size, strict=True)):
            message = f"{list(pixels)} has room for other patches than size, which is {list(self.size)}"
            yield Problem("pixels", f"{message}; it is less than one patch larger")

    @property
    def blocks(self) -> int:
        """The blocks that are built: all but those after `select_layer`."""
        return self.layers + 1 + self.select_layer

    @property
    def _table(self) -> tuple[int, int]:
        return self.size[0] // self.patch, self.size[1] // self.patch

    def image_format(self) -> ImageFormat:
        """Returns a format with a fixed grid, the position table's, unless the table is interpolated."""
        return ImageFormat(
            patch=self.patch,
            mean=self.mean,
            std=self.std,
            resample=self.resample,
            grid=self._table if self.position_interpolation == "none" else None,
            pixels=self.pixels,
        )

    def build(self, context: BuildContext, taps: Sequence[int]) -> nn.Module:
        """Build the blocks up to `select_layer`.

        Raises:
            JobError: the fusion uses the output of a block that is not built.
        """
        from forge_plugin_vision.modules.vit import BlockForm, VisionTransformer

        if taps and taps[-1] >= self.blocks:  # ascending: the last is the largest
            message = f"the fusion uses the output of block {taps[-1]}, and there are {self.blocks}"
            raise JobError([Problem(context.path, f"{message} from 0; name others there, or have more layers")])
        return VisionTransformer(
            values=self.image_format().values,
            width=self.dim,
            layers=self.blocks,  # parameters of later ones would have no gradient
            heads=self.heads,
            hidden=self.hidden or 4 * self.dim,
            grid=self._table,
            interpolation=self.position_interpolation,
            class_token=self.class_token,
            pre_norm=self.pre_norm,
            norm=self.norm,
            patch_bias=self.patch_bias,
            rotary_theta=self.rotary_theta,
            form=BlockForm(
                activation=self.activation,
                eps=self.eps,
                std=self.init_std,
                norm=self.block_norm,
                qk_norm=self.qk_norm,
                attention_bias=self.attention_bias,
                layer_scale=self.layer_scale,
            ),
            taps=taps,
        )
