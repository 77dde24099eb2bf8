"""What the component `RoutedModel` builds. Shapes: N tokens, D width, E experts, K experts of a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.protocols import Batch, Carry, Fill, Role
from forge_core.testing.tiny_model import TinyNetwork


class Experts(nn.Module):
    """W₂ relu(W₁ x) of every expert, (N, D) to (N, E, D)."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, 2 * dim, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, 2 * dim))

    def init_parameter(self, name: str, fill: Fill) -> None:
        fill.normal(0.2)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = F.relu(torch.einsum("nd,ehd->neh", tokens, self.up.to(tokens.dtype)))
        return torch.einsum("neh,edh->ned", hidden, self.down.to(tokens.dtype))


class RoutedLayer(nn.Module):
    """x + Σ weight x expert(x), over the experts that the router gives each token."""

    def __init__(self, dim: int, experts: int, router: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = router, Experts(dim, experts)

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        (x,) = carry
        tokens = x.flatten(0, 1)
        weights, ids = self.router(tokens)
        every = self.experts(tokens)
        chosen = every.gather(1, ids.unsqueeze(-1).expand(-1, -1, every.shape[-1]))
        mixed = (weights.unsqueeze(-1).to(chosen.dtype) * chosen).sum(1)
        return (x + mixed.view_as(x),)


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
