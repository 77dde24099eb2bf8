"""The networks of `TinyModel`, `SplittableModel` and `PenalisedModel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from forge_core.auxiliary import Auxiliary, Unit
from forge_core.contracts.data import Batch
from forge_core.contracts.model import Carry, Model, Role
from forge_kit.nn.modules import Embedding, LayerNorm, Linear, LinearHead
from forge_kit.nn.recomputing import Recomputing


class Layer(nn.Module):
    """x + W₂ relu(W₁ x)."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = Linear(dim, 2 * dim, bias=True, std=0.2), Linear(2 * dim, dim, std=0.2)
        self.dropout = dropout

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        (x,) = carry
        hidden = F.dropout(F.relu(self.up(x)), self.dropout, self.training)
        return (x + self.down(hidden),)


class TinyNetwork(Model):
    """See `forge_core.contracts.model.Model`."""

    def __init__(self, dim: int, layers: int, dropout: float, vocabulary: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, dim, dtype=dtype, std=0.5)
        self.layers = nn.ModuleDict({str(i): Layer(dim, dropout) for i in range(layers)})
        self.norm = LayerNorm(dim)
        self.head = LinearHead(dim, vocabulary, std=0.2)

    def embed(self, batch: Batch) -> Carry:
        return (self.embedding(batch["input_ids"]),)

    def finish(self, carry: Carry, batch: Batch) -> Tensor:
        (x,) = carry
        return self.norm(x)

    def ends(self) -> tuple[Sequence[str], Sequence[str]]:
        return ["embedding"], ["norm", "head"]

    def flops(self, seq_len: int) -> float:
        return 6.0 * sum(p.numel() for n, p in self.named_parameters() if p.ndim > 1 and "embedding" not in n)

    def parameter_roles(self) -> Mapping[str, Role]:
        return {"embedding.weight": "embedding", "head.weight": "head"}


class Pair(nn.Module):
    """W₂ relu(W₁ x), as a separate module, for which tensor parallel can gather all positions."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = Linear(dim, 2 * dim, bias=True, std=0.2), Linear(2 * dim, dim, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class SplittableLayer(nn.Module):
    """x + W₂ relu(W₁ x)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.pair = Pair(dim)

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        (x,) = carry
        return (x + self.pair(x),)


class SplittableNetwork(TinyNetwork):
    """`TinyNetwork` with a tensor-parallel plan."""

    def __init__(self, dim: int, layers: int, vocabulary: int, dtype: torch.dtype) -> None:
        super().__init__(dim, 0, 0.0, vocabulary, dtype)
        self.layers = nn.ModuleDict({str(i): SplittableLayer(dim) for i in range(layers)})

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        layer = {"layers.*.up": "column", "layers.*.down": "row", "layers.*.pair": "whole_input"}
        return {"embedding": "vocab_embedding", **layer, "norm": "sequence", "head": "vocab_head"}


class PatchNetwork(TinyNetwork):
    """`TinyNetwork` whose `embed` runs an encoder of the entry `patches` (B, P, V), uint8."""

    def __init__(self, dim: int, layers: int, vocabulary: int, dtype: torch.dtype, patch: int, blocks: int) -> None:
        super().__init__(dim, layers, 0.0, vocabulary, dtype)
        self.patch = Linear(patch, dim, std=0.2)
        self.encoder = nn.ModuleDict({str(i): Pair(dim) for i in range(blocks)})

    def embed(self, batch: Batch) -> Carry:
        (x,) = super().embed(batch)
        features = self.patch(batch["patches"].to(x.dtype) / 255)
        for block in self.encoder.values():
            features = features + block(features)
        return (x + features.mean(1, keepdim=True),)

    def ends(self) -> tuple[Sequence[str], Sequence[str]]:
        return ["embedding", "patch", "encoder"], ["norm", "head"]

    def further_blocks(self) -> Sequence[str]:
        return [f"encoder.{name}" for name in self.encoder] if isinstance(self.encoder, nn.ModuleDict) else []

    def fsdp_units(self) -> Sequence[Sequence[str]]:
        return [*([name] for name in self.further_blocks()), *super().fsdp_units()]


PENALTY = 10.0
"""Weight of each auxiliary loss: large enough that a wrong scale shows."""


class Penalised(nn.Module):
    """A layer that attaches an auxiliary loss in each unit, and counts its forward passes as `aux/forwards.NUMBER`."""

    def __init__(self, number: str, layer: Layer, auxiliary: Auxiliary, recompute: bool) -> None:
        super().__init__()
        self.number, self.layer, self.auxiliary, self.recompute = number, layer, auxiliary, recompute

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        if not self.recompute:
            return self._penalised(carry, batch)

        def contexts() -> Any:
            return nullcontext(), Recomputing(self.auxiliary)

        recomputed: Carry = checkpoint(self._penalised, carry, batch, use_reentrant=False, context_fn=contexts)
        return recomputed

    def _penalised(self, carry: Carry, batch: Batch) -> Carry:
        (x,) = self.layer(carry, batch)
        valid = (batch["labels"] != -100).unsqueeze(-1)
        penalties: dict[Unit, Tensor] = {
            "token": (x.square() * valid).sum(),
            "sequence": x.mean(dim=1).square().sum(),
            "layer": self.layer.down.weight.square().sum(),
        }
        for unit, penalty in penalties.items():
            x = self.auxiliary.attach(x, penalty, unit=unit, name=f"aux/{unit}", weight=PENALTY)
        self.auxiliary.metric(f"aux/forwards.{self.number}", torch.ones(()))
        return (x,)


def penalise(network: TinyNetwork, auxiliary: Auxiliary, recompute: bool = False) -> TinyNetwork:
    """Wraps each layer of the network in `Penalised`."""
    for number, layer in network.layers.items():
        assert isinstance(layer, Layer)
        network.layers[number] = Penalised(number, layer, auxiliary, recompute)
    return network
