"""The adapters: `linear`, `mlp`, `pixel_shuffle`, `average_pool`, `attention_pool` and `perceiver`."""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import deep_iterable, ge, gt

from forge_core.contracts.errors import JobError, Problem
from forge_kit.optim.fields import DEPTH
from forge_plugin_vision.kinds import AdapterComponent, Grid

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu"]


@frozen(kw_only=True)
class LinearAdapter(AdapterComponent):
    """One matrix; each patch is a position."""

    bias: bool = True
    """Whether it has a bias."""

    def positions(self, grid: Grid) -> int:
        """Returns one position for each patch of each frame."""
        return grid.patches

    def build(self, context: BuildContext, width: int, dim: int) -> nn.Module:
        from forge_plugin_vision.modules.adapters import Projection

        return Projection(width, dim, bias=self.bias)


@frozen(kw_only=True)
class MLPAdapter(AdapterComponent):
    """down(activation(up(x))), as in LLaVA-1.5 (Liu et al. 2023); each patch is a position."""

    hidden: int = field(default=0, validator=ge(0))
    """Width between the matrices; 0: the language model's width."""
    activation: Activation = "gelu"
    """Between the matrices."""
    bias: bool = True
    """Whether the matrices have biases."""

    def positions(self, grid: Grid) -> int:
        """Returns one position for each patch of each frame, as `linear` does."""
        return grid.patches

    def build(self, context: BuildContext, width: int, dim: int) -> nn.Module:
        from forge_plugin_vision.modules.adapters import TwoLayers

        return TwoLayers(width, self.hidden or dim, dim, activation=self.activation, bias=self.bias)


@frozen(kw_only=True)
class PixelShuffle(AdapterComponent):
    """Joins the features of `factor` x `factor` patches, and projects them with one matrix (Idefics3, SmolVLM).

    With `hidden`, further matrices come before it, each followed by GELU (Llama 4).
    """

    factor: int = field(default=2, validator=gt(0))
    """Rows and columns that become one; sizes of images in patches are multiples of it."""
    hidden: tuple[int, ...] = field(default=(), validator=deep_iterable(gt(0)))
    """Widths behind further matrices before the last one; Llama 4: `[4096, 4096]`. Empty: there are none."""
    bias: bool = False
    """Whether the matrices have biases."""

    @property
    def multiple(self) -> int:
        """The factor, so that no window is cut by an image's edge."""
        return self.factor

    def positions(self, grid: Grid) -> int:
        """Returns one position for each `factor` x `factor` patches of a frame."""
        return _windows(grid, self.factor, ragged=False)

    def build(self, context: BuildContext, width: int, dim: int) -> nn.Module:
        from forge_plugin_vision.modules.pooling import ShuffledProjection

        return ShuffledProjection(width, self.factor, self.hidden, dim, bias=self.bias)


@frozen(kw_only=True)
class AveragePool(AdapterComponent):
    """Averages windows of features, then applies the same layers as `mlp`."""

    window: int = field(default=2, validator=gt(0))
    """Rows and columns of patches that become one position."""
    video_window: int = field(default=0, validator=ge(0))
    """The same for grids of several frames, in each frame; 0: `window`. Molmo2 has 2 and 3."""
    ragged: bool = False
    """Whether images may have any size in patches, and windows at their edges average over fewer; otherwise sizes are
    multiples of both windows. Room is then made for as many windows as patches."""
    hidden: int = field(default=0, validator=ge(0))
    """Width between the matrices; 0: the language model's width."""
    activation: Activation = "gelu"
    """Between the matrices."""
    bias: bool = True
    """Whether the matrices have biases."""

    @property
    def multiple(self) -> int:
        """The least common multiple of both windows; 1 if windows at edges may be smaller."""
        # Of both, as an image and a clip have one multiple: `ImageFormat.multiple`
        return 1 if self.ragged else lcm(self.window, self.video_window or self.window)

    def positions(self, grid: Grid) -> int:
        """Returns one position for each window of a frame; with `ragged`, also for windows cut by an edge."""
        return _windows(grid, self.window, self.video_window, ragged=self.ragged)

    def build(self, context: BuildContext, width: int, dim: int) -> nn.Module:
        """Build it; both layers come after averaging, so they compute windows and not patches."""
        from forge_plugin_vision.modules.adapters import TwoLayers
        from forge_plugin_vision.modules.pooling import AveragedWindows, Windows

        projection = TwoLayers(width, self.hidden or dim, dim, activation=self.activation, bias=self.bias)
        return AveragedWindows(Windows(self.window, self.video_window or self.window, ragged=self.ragged), projection)


@frozen(kw_only=True)
class AttentionPool(AdapterComponent):
    """Attention over a window of features, whose mean is the query, then down(silu(gate(x)) up(x)) (Molmo2)."""

    window: int = field(default=2, validator=gt(0))
    """Rows and columns of patches that become one position."""
    video_window: int = field(default=0, validator=ge(0))
    """The same for grids of several frames, in each frame; 0: `window`. Molmo2 has 2 and 3."""
    ragged: bool = False
    """Whether images may have any size in patches, and windows at their edges are smaller; otherwise sizes are
    multiples of both windows. Room is then made for as many windows as patches."""
    heads: int = field(default=16, validator=gt(0))
    """Attention heads, a divisor of the encoder's width."""
    attention_bias: bool = True
    """Whether the matrices of the attention have biases."""
    hidden: int = field(default=0, validator=ge(0))
    """Width of gate and up; 0: 4 times the language model's width."""

    @property
    def multiple(self) -> int:
        """The least common multiple of both windows; 1 if windows at edges may be smaller."""
        return 1 if self.ragged else lcm(self.window, self.video_window or self.window)

    def positions(self, grid: Grid) -> int:
        """Returns one position for each window of a frame; with `ragged`, also for windows cut by an edge."""
        return _windows(grid, self.window, self.video_window, ragged=self.ragged)

    def build(self, context: BuildContext, width: int, dim: int) -> nn.Module:
        """Build it, with attention in the encoder's width.

        Raises:
            JobError: `heads` does not divide that width, which only the built encoder states.
        """
        from forge_plugin_vision.modules.pooling import AttendedWindows, Windows

        if width % self.heads:
            message = f"{self.heads} does not divide the encoder's width, which is {width}"
            raise JobError([Problem(f"{context.path}.heads", message)])
        return AttendedWindows(
            Windows(self.window, self.video_window or self.window, ragged=self.ragged),
            width,
            self.hidden or 4 * dim,
            dim,
            heads=self.heads,
            attention_bias=self.attention_bias,
        )


@frozen(kw_only=True)
class Perceiver(AdapterComponent):
    """Learned latents attend to an image and to each other (Flamingo, Alayrac et al. 2022; OpenFlamingo).

    An image of any size takes as many positions as there are latents.
    """

    latents: int = field(default=64, validator=gt(0))
    """Positions of an image."""
    layers: int = field(default=6, validator=DEPTH)
    """Number of blocks."""
    heads: int = field(default=8, validator=gt(0))
    """Attention heads."""
    head_dim: int = field(default=64, validator=gt(0))
    """Width of a head."""
    hidden: int = field(default=0, validator=ge(0))
    """Width between the matrices of the feed-forward part; 0: 4 times the encoder's width."""

    def positions(self, grid: Grid) -> int:
        """Returns the number of latents, whatever the size; 0 for an empty grid, which is no image."""
        return (grid.patches > 0) * self.latents

    def build(self, context: BuildContext, width: int, dim: int) -> nn.Module:
        """Build it; blocks have the encoder's width W, and a last matrix maps to D."""
        from forge_plugin_vision.modules.perceiver import Resampler

        return Resampler(
            width,
            dim,
            latents=self.latents,
            layers=self.layers,
            heads=self.heads,
            head_dim=self.head_dim,
            hidden=self.hidden or 4 * width,
        )


def _windows(grid: Grid, window: int, video_window: int = 0, *, ragged: bool) -> int:
    """Returns the number of windows of an image; `video_window` applies to grids of several frames, 0: `window`."""
    images = _windows_of_side(grid, window, ragged=ragged)
    if video_window in (0, window):
        return images
    videos, are_videos = _windows_of_side(grid, video_window, ragged=ragged), (grid.frames > 1) * 1  # or a tensor
    # A sum of products in place of a condition, which tensors of many grids do not allow
    return are_videos * videos + (1 - are_videos) * images


def _windows_of_side(grid: Grid, side: int, *, ragged: bool) -> int:
    more = side - 1 if ragged else 0  # rounds up, so that windows at edges count
    return grid.frames * ((grid.rows + more) // side) * ((grid.columns + more) // side)
