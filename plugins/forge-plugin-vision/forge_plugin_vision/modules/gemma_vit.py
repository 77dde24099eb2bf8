"""Blocks of the encoder `gemma_vit`, and the adapter `scaled_pool`.

Shapes: B rows, P patches of a row, M windows of a row, W width of the encoder, E width of a head, D width of the
language model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_kit.nn.modules import Linear, cast
from forge_plugin_transformer.modules.feed_forward import GELUGatedFeedForward
from forge_plugin_transformer.modules.norms import RootMeanSquareNorm, normed_without_gain
from forge_plugin_transformer.modules.rotary import rotate
from forge_plugin_vision.modules.pooling import Windows, means
from forge_plugin_vision.modules.qwen_vit import Sight, attend

if TYPE_CHECKING:
    from forge_core.contracts.model import Fill
    from forge_plugin_transformer.kinds import InitStd
    from forge_plugin_vision.kinds import Grid
    from forge_plugin_vision.modules.images import Images


BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class Bounds(nn.Module):
    """Least and largest numbers that a matrix reads and returns; they are in checkpoints, and are not trained."""

    input_min: Tensor
    input_max: Tensor
    output_min: Tensor
    output_max: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in BOUNDS:
            self.register_buffer(name, torch.empty(()))

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Raises AssertionError, as there are no parameters to fill."""
        raise AssertionError(f"bounds have no parameter {name}")

    def init_buffers(self, device: torch.device) -> None:
        """Starts with infinite numbers, which clip nothing."""
        for name in BOUNDS:
            getattr(self, name).fill_(math.inf if name.endswith("max") else -math.inf)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """(…, in) and (out, in) to (…, out)."""
        low, high, least, largest = (cast(getattr(self, name), x.dtype) for name in BOUNDS)
        return F.linear(x.clamp(low, high), weight).clamp(least, largest)


class ClippedLinear(nn.Module):
    """N matrices, one below the other in `weight` (out, in), each of which clips its inputs and outputs."""

    # No `Linear`: adapters of low rank would add to what has been clipped, and could not be merged

    def __init__(self, in_features: int, out_features: int, *, matrices: int = 1, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bounds = nn.ModuleList(Bounds() for _ in range(matrices))

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Draws the matrices as `Linear` does."""
        fill.normal(self.std)

    def init_buffers(self, device: torch.device) -> None:
        """Only `bounds` have some."""

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) to (…, out)."""
        weights = cast(self.weight, x.dtype).chunk(len(self.bounds))
        return torch.cat([bounds(x, weight) for bounds, weight in zip(self.bounds, weights, strict=True)], -1)


class GemmaBlock(nn.Module):
    """x + norm(o(attention(qkv(norm(x))))), then x + norm(ffn(norm(x)))."""

    def __init__(
        self, width: int, *, heads: int, head_dim: int, hidden: int, eps: float, init: InitStd, clipped: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.scale, self.eps = heads, head_dim**0.5, eps
        self.attention_norm, self.attention_post_norm = (RootMeanSquareNorm(width, eps=eps) for _ in range(2))
        self.ffn_norm, self.ffn_post_norm = (RootMeanSquareNorm(width, eps=eps) for _ in range(2))
        self.q_norm, self.k_norm = (RootMeanSquareNorm(head_dim, eps=eps) for _ in range(2))
        self.qkv: nn.Module = Linear(width, 3 * heads * head_dim, bias=False, std=init.inner)
        self.o: nn.Module = Linear(heads * head_dim, width, bias=False, std=init.residual)
        self.ffn = GELUGatedFeedForward(width, hidden, bias=False, approximate="tanh", init=init)
        if clipped:
            self.qkv = ClippedLinear(width, 3 * heads * head_dim, matrices=3, std=init.inner)
            self.o = ClippedLinear(heads * head_dim, width, std=init.residual)
            for name in ("gate", "up"):
                self.ffn.register_module(name, ClippedLinear(width, hidden, std=init.inner))
            self.ffn.register_module("down", ClippedLinear(hidden, width, std=init.residual))

    def forward(self, x: Tensor, tables: Tensor, sight: Sight) -> Tensor:
        """(B, P, W) -> (B, P, W); `tables` are from `ApartRotary`."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = (self._turned(norm(part), tables) for norm, part in ((self.q_norm, q), (self.k_norm, k)))
        # The factor of attention's kernel is 1 / sqrt(E), and scores have none here.
        mixed = attend(q * self.scale, k, normed_without_gain(v, self.eps), sight)
        x = x + self.attention_post_norm(self.o(mixed.flatten(2)))
        # Feed-forward parts of the transformer take a batch, of which this uses nothing
        return x + self.ffn_post_norm(self.ffn(self.ffn_norm(x), {}))

    def _turned(self, x: Tensor, tables: Tensor) -> Tensor:
        """Rotates each half of the heads (B, P, H, E) by its own place."""
        return rotate(x.unflatten(-1, (2, -1)), tables[0], tables[1]).flatten(-2)


class ScaledWindows(nn.Module):
    """project(norm((sqrt(W) mean - shift) * factor)) of each window: (B, P, W) to (B, M, D)."""

    def __init__(self, width: int, dim: int, *, side: int, standardise: bool, eps: float) -> None:
        super().__init__()
        self.windows, self.scale, self.eps = Windows(side, side, ragged=False), width**0.5, eps
        for name in ("shift", "factor"):
            self.register_parameter(name, nn.Parameter(torch.empty(width)) if standardise else None)
        self.project = Linear(width, dim, bias=False)

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Starts with a shift of 0 and a factor of 1, which change nothing."""
        fill.constant(float(name == "factor"))

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, features: Tensor, images: Images) -> Tensor:
        """Computes in float32 or wider up to the norm: `shift` is large, as the features are."""
        x = means(features, *self.windows.members(images))
        wide = torch.promote_types(x.dtype, torch.float32)
        x = x.to(wide) * self.scale
        if self.shift is not None:
            x = (x - self.shift.to(wide)) * self.factor.to(wide)
        projected: Tensor = self.project(normed_without_gain(x.to(features.dtype), self.eps))
        return projected

    def flops(self, grid: Grid) -> float:
        """Counts 6 a weight and window."""
        return 6.0 * self.windows.count(grid) * self.project.weight.numel()
