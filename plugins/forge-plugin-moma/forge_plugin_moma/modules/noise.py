"""Gumbel noise on scores. Shapes: B sequences, S positions, E experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from forge_kit.nn.noise import MANTISSA, token_noise

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch

SPREAD = 0x1E3779B97F4A7C15
"""Odd and large, so that multiples of it differ from one another in bits that no draw has."""


class GumbelNoise(nn.Module):
    """G' - G'' of equation 5, the difference of two Gumbel variables, for each position and expert.

    It has the logistic distribution, whose quantile function is the logit, so one uniform number makes it.

    Buffer: `salt` (), a number of the layer. As a tensor it lets layers share one compiled graph.
    """

    salt: Tensor

    def __init__(self, layer: int, experts: int) -> None:
        super().__init__()
        self._layer, self._experts = layer, experts
        self.register_buffer("salt", torch.empty((), dtype=torch.int64), persistent=False)

    def init_buffers(self, device: torch.device) -> None:
        """Recomputes `salt` from the number of the layer."""
        self.salt.fill_((self._layer + 1) * SPREAD % 2**63)

    def init_parameter(self, name: str, fill: object) -> None:
        """There are none."""

    def forward(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """Returns (B, S, E), the same on every layout."""
        ids = batch["input_ids"]
        draw = batch["draw"] if "draw" in batch else ids.new_zeros(len(ids))
        uniform = token_noise({**batch, "draw": draw ^ self.salt}, self._experts, "moma")
        # Of its values only 0 has no finite logit. In the dtype of the scores: float32 logits differ in their last
        # digit by where in a tensor they are computed, which float64 runs would see.
        return torch.logit(uniform.to(dtype), eps=0.5 ** (MANTISSA + 1))
