"""A softmax router. Shapes: B sequences, S positions, D width, E experts, K experts of a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_kit.nn.modules import Linear

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch


class Gate(nn.Module):
    """Softmax over the K highest of E scores."""

    def __init__(self, dim: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.scores = Linear(dim, experts)
        self.experts_per_token = top_k

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """(B, S, D) -> weights (B, S, K), whose sum is 1, and numbers of experts (B, S, K) int64."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # bf16 is too coarse to rank experts; float64 stays
        weight = self.scores.weight.to(x.dtype).to(wide.dtype)  # rounded as FSDP does, or experts depend on the layout
        scores, experts = F.linear(wide, weight).topk(self.experts_per_token)
        return scores.softmax(-1), experts
