"""A learned gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from forge_core.contracts.model import Fill


class Gate(nn.Module):
    """tanh(weight) x; `weight` (1,) is `start` at first."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.empty(1))

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Starts at `start`; with 0, what passes the gate has no effect at first."""
        fill.constant(self.start)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype).tanh()
