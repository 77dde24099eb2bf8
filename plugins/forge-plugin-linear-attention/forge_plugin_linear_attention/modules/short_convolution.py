"""The module of `short_conv`.

Shapes: B sequences, S positions, D model width, each feature of which is a head to `cp`, W positions of the
convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from forge_kit.nn.causal_convolution import ConvolutionCore, TailCache
from forge_kit.nn.modules import Linear
from forge_plugin_linear_attention.modules.attention import PerHead

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Role
    from forge_plugin_transformer.kinds import InitStd


class ShortConvolution(nn.Module):
    """o(c(x) * conv(b(x) * v(x))): see `forge_plugin_transformer.kinds.AttentionComponent`."""

    def __init__(self, dim: int, *, conv: int, init: InitStd) -> None:
        """Set up the layer.

        Args:
            dim: D.
            conv: W.
            init: deviations of matrices.
        """
        super().__init__()
        self.dim = dim
        self.b = Linear(dim, dim, std=init.inner)
        self.c = Linear(dim, dim, std=init.inner)
        self.v = Linear(dim, dim, std=init.inner)
        self.o = Linear(dim, dim, std=init.residual)
        bound = conv**-0.5  # as torch draws the weights of a convolution with `conv` inputs
        self.filters = PerHead(dim, conv, low=-bound, high=bound)
        self.core = ConvolutionCore()

    def forward(self, x: Tensor, batch: Batch, cache: TailCache | None = None) -> Tensor:
        """(B, S, D) -> (B, S, D). `batch` may hold `document_ids`, (B, S)."""
        further = () if cache is None else (cache,)
        mixed = self.core([self.b(x) * self.v(x)], [self.filters(x.dtype)], batch, *further)
        return self.o(self.c(x) * mixed)

    def new_cache(self, batch_size: int, length: int) -> TailCache:
        """Returns an empty cache, of a size that does not depend on `length`."""
        return TailCache()

    def flops(self, seq_len: int) -> float:
        """Counts 6 a weight, with the filters of the convolution."""
        return 6.0 * sum(parameter.numel() for parameter in self.parameters())

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        """Ranks divide the features."""
        return {"": "whole_input", **dict.fromkeys(("b", "c", "v", "filters"), "column"), "o": "row"}

    def parameter_roles(self) -> Mapping[str, Role]:
        """Makes the filters a norm: no matrix that an optimizer may turn, and no weight decay."""
        return {"filters.weight": "norm"}

    def sequence_mixers(self) -> Mapping[str, int]:
        """Names the core, whose features ranks share under `cp`."""
        return {"core": self.dim}
