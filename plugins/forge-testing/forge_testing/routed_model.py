"""The network of `RoutedModel`. Shapes: B sequences, S positions, D width, E experts, K experts of a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.contracts.data import Batch
from forge_core.contracts.model import Carry, Fill, Role
from forge_testing.tiny_model import TinyNetwork


class Experts(nn.Module):
    """W₂ relu(W₁ x) of every expert, (B, S, D) to (B, S, E, D)."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, 2 * dim, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, 2 * dim))

    def init_parameter(self, name: str, fill: Fill) -> None:
        fill.normal(0.2)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(torch.einsum("bsd,ehd->bseh", x, self.up.to(x.dtype)))
        return torch.einsum("bseh,edh->bsed", hidden, self.down.to(x.dtype))


class RoutedLayer(nn.Module):
    """x + Σ weight x expert(x), over the experts that the router assigns to each token."""

    def __init__(self, dim: int, experts: int, router: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = router, Experts(dim, experts)

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        (x,) = carry
        weights, ids = self.router(x, batch)
        every = self.experts(x)
        chosen = every.gather(2, ids.clamp(min=0).unsqueeze(-1).expand(*ids.shape, x.shape[-1]))
        weights = weights.where(ids >= 0, 0).to(x.dtype)
        return (x + (weights.unsqueeze(-1) * chosen).sum(2),)


class RoutedNetwork(TinyNetwork):
    """`TinyNetwork` with a `RoutedLayer` for each router."""

    def __init__(
        self, dim: int, experts: int, routers: Sequence[nn.Module], vocabulary: int, dtype: torch.dtype
    ) -> None:
        super().__init__(dim, 0, 0.0, vocabulary, dtype)
        layers = {str(number): RoutedLayer(dim, experts, router) for number, router in enumerate(routers)}
        self.layers = nn.ModuleDict(layers)

    def parameter_roles(self) -> Mapping[str, Role]:
        roles: dict[str, Role] = {**super().parameter_roles()}
        for name, _ in self.named_parameters():
            if ".router." in name:
                roles[name] = "router"
            elif ".experts." in name:
                roles[name] = "stack"
        return roles
