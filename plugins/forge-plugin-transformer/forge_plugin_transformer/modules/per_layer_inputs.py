"""Inputs of layers beside the residual stream.

Shapes: B sequences, S positions, D model width, L layers, P width of an input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_kit.nn.direct_calls import directly_callable
from forge_kit.nn.modules import Linear
from forge_plugin_transformer.modules.ends import ScaledEmbedding

if TYPE_CHECKING:
    from forge_plugin_transformer.kinds import InitStd


class LayerInputs(nn.Module):
    """(norm(projection(x) / sqrt(D)) + table(ids)) / sqrt(2) for each layer, where rows of the table times sqrt(P)."""

    def __init__(
        self,
        rows: int,
        dim: int,
        *,
        width: int,
        layers: int,
        norm: nn.Module,
        dtype: torch.dtype,
        std: float,
        padding_row: int = 0,
    ) -> None:
        """Set up the module.

        Args:
            rows: of the table.
            dim: D.
            width: P.
            layers: L.
            norm: over P features.
            dtype: of the table's rows.
            std: deviation of initial matrices.
            padding_row: the row of ids that are not in the table.
        """
        super().__init__()
        self.rows, self.width, self.padding_row = rows, width, padding_row
        self.table = ScaledEmbedding(rows, layers * width, scale=width**0.5, dtype=dtype, std=std)
        self.projection = Linear(dim, layers * width, std=std)
        self.norm = norm
        self.scale: float = dim**-0.5

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        """(B, S) int64 and (B, S, D) to (B, S, L, P)."""
        # Ids of other media are negative, or beyond the table
        known = (ids >= 0) & (ids < self.rows)
        own = self.table(ids.where(known, self.padding_row)).unflatten(-1, (-1, self.width))
        read = (self.projection(x) * self.scale).unflatten(-1, (-1, self.width))
        inputs: Tensor = (self.norm(read) + own) * 2.0**-0.5
        return inputs


@directly_callable
class LayerInputReader(nn.Module):
    """x + norm(projection(gelu(gate(x)) * p)) with the layer's input p."""

    def __init__(self, dim: int, width: int, *, norm: nn.Module, approximate: str, init: InitStd) -> None:
        super().__init__()
        self.gate = Linear(dim, width, std=init.inner)
        self.projection = Linear(width, dim, std=init.residual)
        self.norm = norm
        self.approximate = approximate

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        """(B, S, D) and (B, S, P) to (B, S, D)."""
        return x + self.added(x, own)

    def added(self, x: Tensor, own: Tensor) -> Tensor:
        """Returns the term that `forward` adds to x."""
        added: Tensor = self.norm(self.projection(F.gelu(self.gate(x), approximate=self.approximate) * own))
        return added
