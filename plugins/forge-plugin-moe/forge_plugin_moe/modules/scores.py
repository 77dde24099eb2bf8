"""Base of routers that score experts by a linear function. Shapes: B sequences, S positions, D width, E experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.contracts.model import Fill
from forge_kit.nn.taps import TapPoint
from forge_plugin_moe.modules.sequences import Sequences

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forge_core.contracts.contexts import BuildContext
    from forge_plugin_moe.moe import LinearRouter


class LinearScores(nn.Module):
    """The linear function, and the loss that keeps its values from growing."""

    def __init__(self, component: LinearRouter, context: BuildContext, dim: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.scored = nn.Identity()
        """Logits pass through here, for taps."""
        self.auxiliary, self.layer = context.auxiliary, context.layer or 0
        self.sequences = Sequences.of(context)
        self._std, self._z_loss = component.init_std, component.z_loss
        self.share = 1 / context.layout.tp
        """Tensor-parallel ranks all compute this, and their gradients are summed."""

    def init_parameter(self, name: str, fill: Fill) -> None:
        fill.normal(self._std)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def logits(self, x: Tensor) -> Tensor:
        """(B, S, D) to (B, S, E), in float32 or wider."""
        logits: Tensor = self.scored(self.linear(x))
        return logits

    def linear(self, x: Tensor) -> Tensor:
        """The same, for a derived class to extend."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        # Rounded like every other weight first: FSDP gathers it in the compute dtype, and with more digits in one
        # process than under FSDP, tokens between two experts would go to another one there.
        return F.linear(x.to(dtype), self.weight.to(x.dtype).to(dtype))

    def tap_points(self) -> Mapping[str, TapPoint]:
        """The logits (B, S, E), before any bias that only balances: equal on all tensor-parallel ranks."""
        return {"router_logits": TapPoint("scored", axes="whole")}

    def penalise(self, weights: Tensor, logits: Tensor) -> Tensor:
        """Returns the weights with the z-loss attached."""
        if not self._z_loss:
            return weights
        # Of the whole sequence: the sum over its pieces is then the mean, on any number of ranks
        length = logits.shape[1] * self.sequences.pieces
        value = logits.logsumexp(-1).square().sum() / length
        name, weight = "moe/z_loss", self._z_loss * self.share
        return self.auxiliary.attach(weights, value, unit="sequence", name=name, weight=weight)
