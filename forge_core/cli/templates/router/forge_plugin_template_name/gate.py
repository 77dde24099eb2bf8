"""What the component builds. Shapes: N tokens, D width, E experts, K experts of a token."""

from __future__ import annotations

from torch import Tensor, nn

from forge_core.modules import Linear


class Gate(nn.Module):
    """Softmax over the K highest of E scores."""

    def __init__(self, dim: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.scores = Linear(dim, experts)
        self.top_k = top_k

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(N, D) -> weights (N, K), whose sum is 1, and numbers of experts (N, K) int64."""
        scores, ids = self.scores(tokens).topk(self.top_k)
        return scores.softmax(-1), ids
