"""The module of `short_conv`, and its cache.

Shapes: B sequences, S positions, D model width, each feature of which is a head to `cp`, W positions of the
convolution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from forge_kit.nn.modules import Linear
from forge_plugin_linear_attention.modules.attention import PerHead
from forge_plugin_linear_attention.modules.causal_convolution import causal_convolution
from forge_plugin_linear_attention.modules.delta_rule import numbered

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Role
    from forge_plugin_transformer.kinds import InitStd


class TailCache:
    """The last inputs of a convolution; see `forge_kit.nn.generation.Generates.new_cache`. Its rows can be joined."""

    joinable = True

    def __init__(self) -> None:
        self.tail: Tensor | None = None
        """(B, W - 1, D); None before the first position."""

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return 0 if self.tail is None else self.tail.nbytes

    def convolved(self, x: Tensor, weight: Tensor, batch: Batch) -> Tensor:
        """Returns the convolution of the next positions (B, S, D), and keeps their last inputs."""
        if "positions" in batch:  # padding has a negative position, and counts as nothing
            x = x * (batch["positions"] >= 0)[..., None]
        width = weight.shape[-1]
        before = x.new_zeros(len(x), width - 1, x.shape[-1]) if self.tail is None else self.tail
        whole = torch.cat([before, x], 1)
        self.tail = whole[:, whole.shape[1] - width + 1 :]
        return causal_convolution(x, weight, before=before)

    def joined(self, parts: Sequence[tuple[TailCache, Tensor]], columns: int, length: int) -> TailCache:
        """Returns a cache of rows of several; `columns` and `length` do not matter here."""
        new = TailCache()
        tails = [cache.tail.index_select(0, rows) for cache, rows in parts if cache.tail is not None]
        new.tail = torch.cat(tails) if tails else None
        return new


class ConvolutionCore(nn.Module):
    """Convolves each feature by itself; see `forge_kit.nn.head_mixers.MixesHeads`, to which a feature is a head."""

    mixes_heads = True

    def forward(
        self,
        tensors: Sequence[Tensor],
        per_head: Sequence[Tensor],
        batch: Batch,
        cache: TailCache | None = None,
    ) -> Tensor:
        """Returns (B, S, D).

        Args:
            tensors: one, (B, S, D).
            per_head: the weight of the convolution, (D, W).
            batch: `document_ids` (B, S), if documents are apart.
            cache: positions before these ones, which is extended; then each row is one document.
        """
        [x], [weight] = tensors, per_head
        if cache is not None:
            return cache.convolved(x, weight, batch)
        documents = numbered(batch["document_ids"]) if "document_ids" in batch else None
        return causal_convolution(x, weight, documents)


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
