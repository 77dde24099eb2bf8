"""Residual streams under every layout: the conformance suite with hyper-connections, mHC, and a stranger's residual."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import nn

from forge_plugin_transformer import (
    GroupedQueryAttention,
    HyperConnections,
    ManifoldHyperConnections,
    MultiTokenPrediction,
    ResidualComponent,
    Transformer,
)
from forge_testing.suites import ModelSuite

HEADS = GroupedQueryAttention(heads=4, kv_heads=2)
SIZES: dict[str, Any] = {"vocab_size": 32, "dim": 16, "layers": 2, "attention": HEADS}


class TestHyperConnections(ModelSuite):
    component = Transformer(**SIZES, residual_connection=HyperConnections(streams=3), residual_scale=0.5)
    layouts = ("tp2", "tp2_whole_sequences", "pp2", "checkpointing2")


class TestStaticHyperConnectionsThatPredictFurther(ModelSuite):
    """One of two streams in each of three layers; learned positions and a tied head at the ends."""

    component = Transformer(
        **{**SIZES, "layers": 3}, norm_placement="post", learned_positions=64, tie_embeddings=True,
        mtp=MultiTokenPrediction(depth=2), residual_connection=HyperConnections(streams=2, dynamic=False),
    )  # fmt: skip
    layouts = ("fsdp2", "pp2")


class TestManifoldHyperConnections(ModelSuite):
    component = Transformer(**SIZES, residual_connection=ManifoldHyperConnections(streams=3, iterations=5))
    layouts = ("tp2", "cp2")


class TestHyperConnectionsOfOneStream(ModelSuite):
    component = Transformer(**SIZES, residual="parallel", residual_connection=HyperConnections(streams=1))
    layouts = ("tp2",)


class Gated(nn.Module):
    """x + sigmoid(g) * f(x), with a plan of no kind: the model's own takes its place."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(dim))

    def init_parameter(self, name: str, fill: Any) -> None:
        fill.constant(1.0)

    def init_buffers(self, device: torch.device) -> None:
        pass

    def forward(self, x: torch.Tensor, branch: Any) -> torch.Tensor:
        return x + self.gate.to(x.dtype).sigmoid() * branch(x)


@frozen(kw_only=True)
class GatedResidual(ResidualComponent):
    def build(self, context: Any, dim: int, init: Any, part: int) -> nn.Module:
        return Gated(dim)


class TestAResidualOfAStranger(ModelSuite):
    component = Transformer(**SIZES, residual="parallel", norm_placement="shared", residual_connection=GatedResidual())
    layouts = ("fsdp2", "tp2_whole_sequences")
