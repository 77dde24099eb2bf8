"""Alternating updates of residual streams, and a learned residual of low rank.

Shapes: B sequences, S positions, n streams, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_kit.nn.modules import Linear, cast

if TYPE_CHECKING:
    from forge_core.contracts.model import Fill, Role
    from forge_plugin_transformer.kinds import InitStd

LEAST = 1e-5
"""Least mean square that a stream is divided by."""


class AlternatingUpdate(nn.Module):
    """Predicts all streams, computes on one, and corrects all.

    With m(x) = tanh(`router` norm(x) / D): streams X become X + P(m(active)) X, where P has n x n numbers that
    `prediction` makes; then each gets (1 + c_i) times what the layer has changed of the active one, where c =
    `correction` m(changed).
    """

    def __init__(self, dim: int, streams: int, *, active: int, clip: float, norm: nn.Module, std: float) -> None:
        """Set up the module.

        Args:
            dim: D.
            streams: n.
            active: number of the stream that the layer computes on.
            clip: bound of `prediction` and `correction` in training; 0: none.
            norm: over D features.
            std: deviation of the initial `router`.
        """
        super().__init__()
        self.dim, self.streams, self.active, self.clip, self.std = dim, streams, active, clip, std
        self.router = nn.Parameter(torch.empty(streams, dim))
        self.prediction = nn.Parameter(torch.empty(streams**2, streams))
        self.correction = nn.Parameter(torch.empty(streams, streams))
        self.output_scale = nn.Parameter(torch.empty(dim))
        self.norm = norm

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Draws the router, and fills all else so that streams are not mixed at first and their change is whole."""
        if name == "router":
            fill.normal(self.std)
        else:
            fill.constant(1.0 if name == "output_scale" else 0.0)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """(B, S, n, D) to the same, and the active stream of it, scaled by feature: (B, S, D).

        `branch` is the layer, (B, S, D) to (B, S, D), and is called once.
        """
        mixing = F.linear(self.modalities(x[..., self.active, :]), self._clipped(self.prediction, x))
        predicted = mixing.unflatten(-1, (self.streams, self.streams)) @ x + x
        changed = branch(predicted[..., self.active, :])
        shares = F.linear(self.modalities(changed), self._clipped(self.correction, x)) + 1
        innovation = changed - predicted[..., self.active, :]
        corrected = predicted + shares.unsqueeze(-1) * innovation.unsqueeze(-2)
        return corrected, corrected[..., self.active, :] * cast(self.output_scale, x.dtype)

    def modalities(self, x: Tensor) -> Tensor:
        """(B, S, D) to (B, S, n), between -1 and 1."""
        routed = F.linear(self.norm(x) / self.dim, cast(self.router, x.dtype))
        # tanh in float32 or wider, as in Gemma 3n's code
        return cast(torch.tanh(cast(routed, torch.promote_types(x.dtype, torch.float32))), x.dtype)

    def _clipped(self, weight: Tensor, x: Tensor) -> Tensor:
        # In training only, as in Gemma 3n's code; without a change of the parameter, which is the optimizer's
        bounded = weight.clamp(-self.clip, self.clip) if self.clip and self.training else weight
        return cast(bounded, x.dtype)

    def flops(self, seq_len: int) -> float:
        """Counts 6 for each weight of coefficients, twice for the router, and 6 for each product."""
        n = self.streams
        return 6.0 * (2 * n * self.dim + n**3 + n**2 + self.dim * n * (n + 1))

    def parameter_roles(self) -> Mapping[str, Role]:
        """Makes the small matrices biases: only the router is a hidden matrix."""
        return {"router": "matrix", "prediction": "bias", "correction": "bias", "output_scale": "norm"}

    def extra_repr(self) -> str:
        return f"streams={self.streams}, active={self.active}"


class StreamsOfEmbeddings(nn.Module):
    """Makes n streams of one: the first is the same, others are linear functions of it, of its magnitude."""

    def __init__(self, dim: int, streams: int, *, std: float) -> None:
        super().__init__()
        self.projections = nn.ModuleList(Linear(dim, dim, std=std) for _ in range(streams - 1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) to (B, S, n, D)."""
        return torch.stack([x, *(_like(projection(x), x) for projection in self.projections)], -2)


class MeanOfStreams(nn.Module):
    """Makes one stream of n: the mean of the first, and of linear functions of the others, of its magnitude."""

    def __init__(self, dim: int, streams: int, *, std: float) -> None:
        super().__init__()
        self.projections = nn.ModuleList(Linear(dim, dim, std=std) for _ in range(streams - 1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, n, D) to (B, S, D)."""
        first, *others = x.unbind(-2)
        mapped = (_like(projection(other), first) for projection, other in zip(self.projections, others, strict=True))
        return torch.stack([first, *mapped], -2).mean(-2)


def _like(x: Tensor, other: Tensor) -> Tensor:
    """Returns x (…, D) with the root mean square of another."""
    target = other.square().mean(-1, keepdim=True).sqrt()
    return x * target / x.square().mean(-1, keepdim=True).clamp(min=LEAST).sqrt()


class LearnedResidual(nn.Module):
    """x + norm(right(left(x))), of rank r (LAuReL, Menghani et al. 2024)."""

    def __init__(self, dim: int, rank: int, *, norm: nn.Module, init: InitStd) -> None:
        super().__init__()
        self.left = Linear(dim, rank, std=init.inner)
        self.right = Linear(rank, dim, std=init.residual)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) to (B, S, D)."""
        added: Tensor = self.norm(self.right(self.left(x)))
        return x + added


class HalvedAddition(nn.Module):
    """(x + f(x)) / sqrt(2)."""

    def forward(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """(B, S, D) to (B, S, D)."""
        return (x + branch(x)) * 2.0**-0.5
