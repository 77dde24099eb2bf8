"""The router `hash`. Shapes: B sequences, S positions, K experts of a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch

PRIME = 2_147_483_647
FACTOR = 48_271
"""Multiplier of the generator of Park and Miller (1988): a permutation of 1 to PRIME - 1, without overflow in int64."""


class HashRouter(nn.Module):
    """See `forge_plugin_moe.Hash`. Each layer has its own hash."""

    def __init__(self, top_k: int, layer: int, experts: int) -> None:
        super().__init__()
        self.experts_per_token = top_k
        self._salt, self._experts = layer + 1, experts

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns weights 1 / K and numbers (B, S, K): K consecutive experts, from the hash of the token's id."""
        # More than vocabularies have words, so that no two layers hash the same number
        number = batch["input_ids"] + self._salt * 1_000_003
        for _ in range(3):
            number = number * FACTOR % PRIME
        choices = torch.arange(self.experts_per_token, device=x.device)
        chosen = (number.unsqueeze(-1) + choices) % self._experts
        dtype = torch.promote_types(x.dtype, torch.float32)
        return torch.full(chosen.shape, 1 / self.experts_per_token, dtype=dtype, device=x.device), chosen
