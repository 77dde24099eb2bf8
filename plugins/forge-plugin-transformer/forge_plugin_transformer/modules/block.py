"""A layer of the transformer. Shapes: B sequences, S positions, D model width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Carry

PARTS = ("attention_norm", "attention", "ffn_norm", "ffn")
"""Parts of a block, in the order of its forward pass."""


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)). The carry is (x (B, S, D),)."""

    def __init__(self, *, attention_norm: nn.Module, attention: nn.Module, ffn_norm: nn.Module, ffn: nn.Module) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.ffn_norm = ffn_norm
        self.ffn = ffn

    def forward(self, carry: Carry, batch: Batch, cache: Any = None) -> Carry:
        (x,) = carry
        x = x + self.attention(self.attention_norm(x), batch, cache)
        return (x + self.ffn(self.ffn_norm(x), batch),)
