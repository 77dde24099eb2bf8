"""A small transformer. Shapes: B sequences, S positions, D width, H heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.contracts.data import Batch
from forge_core.contracts.model import Carry, Model, Role
from forge_kit.nn.modules import Embedding, LayerNorm, Linear, LinearHead


class Attention(nn.Module):
    """Each position attends to itself and the earlier ones of its document."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = Linear(dim, dim), Linear(dim, dim), Linear(dim, dim)
        self.out = Linear(dim, dim)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        query, key, value = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        documents = batch.get("document_ids")
        if documents is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            same = documents[:, None, :, None] == documents[:, None, None, :]
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=same.tril())
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """x + attention(norm(x)), and then x + W2 gelu(W1 norm(x))."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = LayerNorm(dim), Attention(dim, heads)
        self.forward_norm, self.up, self.down = LayerNorm(dim), Linear(dim, 4 * dim), Linear(4 * dim, dim)

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        (x,) = carry
        x = x + self.attention(self.attention_norm(x), batch)
        return (x + self.down(F.gelu(self.up(self.forward_norm(x)))),)


class Network(Model):
    """See `forge_core.contracts.model.Model`."""

    def __init__(self, vocab_size: int, dim: int, layers: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dim = dim
        self.embedding = Embedding(vocab_size, dim, dtype=dtype, std=1.0)
        self.layers = nn.ModuleDict({str(number): Layer(dim, heads) for number in range(layers)})
        self.norm = LayerNorm(dim)
        self.head = LinearHead(dim, vocab_size)

    def embed(self, batch: Batch) -> Carry:
        return (self.embedding(batch["input_ids"]),)

    def finish(self, carry: Carry, batch: Batch) -> Tensor:
        (x,) = carry
        return self.norm(x)

    def ends(self) -> tuple[Sequence[str], Sequence[str]]:
        """Returns the modules of both ends, with which a pipeline can cut the model."""
        return ["embedding"], ["norm", "head"]

    def flops(self, seq_len: int) -> float:
        """Counts 6 a token for each weight of a matrix product, and the causal half of attention."""
        weights = sum(p.numel() for name, p in self.named_parameters() if p.ndim == 2 and name != "embedding.weight")
        return 6.0 * weights + 6.0 * len(self.layers) * self.dim * seq_len

    def parameter_roles(self) -> Mapping[str, Role]:
        return {"embedding.weight": "embedding", "head.weight": "head"}
