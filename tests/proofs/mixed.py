"""A language model of two kinds of blocks: attention within a sliding window, and causal linear attention.

    [model]
    type = "./mixed.py:Mixed"
    blocks = ["window", "linear", "linear", "window"]

It declares the ends that a pipeline needs, and what it costs. Stages that ask for more, `tp` and `cp`, refuse it.
Shapes: B sequences, S positions, C of them in a chunk, D the width, H heads of E elements, D = H E.
"""

from __future__ import annotations

from typing import Literal

import torch
from attrs import field, frozen
from attrs.validators import gt, min_len
from torch import nn
from torch.nn import functional as F

from forge_core import ModelComponent, Problem
from forge_core.contracts.model import Model
from forge_kit.nn.modules import Embedding, Linear, LinearHead


@frozen(kw_only=True)
class Mixed(ModelComponent):
    """Blocks of two kinds in any order. Nothing but the window and causality tells positions apart."""

    blocks: tuple[Literal["window", "linear"], ...] = field(default=("window", "linear"), validator=min_len(1))
    """Kind of each layer. window: softmax attention to the nearest positions. linear: attention to all earlier ones,
    with the kernel elu(x) + 1 (Katharopoulos et al. 2020), at a cost that does not grow with their number."""
    dim: int = field(default=256, validator=gt(0))
    """D."""
    heads: int = field(default=4, validator=gt(0))
    """H."""
    window: int = field(default=128, validator=gt(0))
    """How many positions one sees, itself included."""
    vocab_size: int = field(default=256, validator=gt(0))
    """Rows of the embedding table and of the head."""

    def problems(self, job, layout):
        if self.dim % self.heads:
            yield Problem("heads", f"{self.heads} does not divide dim = {self.dim}")

    def build(self, context):
        mixers = [SlidingWindow(self.window) if kind == "window" else LinearAttention() for kind in self.blocks]
        blocks = [Block(self.dim, self.heads, mixer) for mixer in mixers]
        return Network(blocks, self.dim, self.vocab_size, context.dtype)


class Network(Model):
    """Beside what every model has: its ends and its flops."""

    def __init__(self, blocks: list[Block], dim: int, vocab_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = Embedding(vocab_size, dim, dtype=dtype)
        self.layers = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})
        self.norm = Norm(dim)
        self.head = LinearHead(dim, vocab_size)

    def embed(self, batch):
        return (self.embedding(batch["input_ids"]),)

    def finish(self, carry, batch):
        return self.norm(carry[0])

    def forward(self, batch):
        carry = self.embed(batch)
        for layer in self.layers.values():
            carry = layer(carry, batch)
        return self.finish(carry, batch)

    def ends(self):
        return ["embedding"], ["norm", "head"]

    def flops(self, seq_len: int) -> float:
        matrices = [m.weight for m in self.modules() if isinstance(m, Linear)]
        mixing = sum(layer.mixer.flops(layer.dim, layer.heads, seq_len) for layer in self.layers.values())
        return 6.0 * sum(matrix.numel() for matrix in matrices) + mixing


class Norm(nn.RMSNorm):
    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Block(nn.Module):
    """x + mixer(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, dim: int, heads: int, mixer: nn.Module) -> None:
        super().__init__()
        self.dim, self.heads, self.mixer = dim, heads, mixer
        self.mixer_norm, self.ffn_norm = Norm(dim), Norm(dim)
        self.q, self.k, self.v, self.o = (Linear(dim, dim) for _ in range(4))
        self.up, self.down = Linear(dim, 4 * dim), Linear(4 * dim, dim)

    def forward(self, carry, batch):
        (x,) = carry
        normed = self.mixer_norm(x)
        q, k, v = (part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = self.mixer(q, k, v, documents(batch))
        x = x + self.o(mixed.to(x.dtype).transpose(1, 2).flatten(-2))
        return (x + self.down(F.gelu(self.up(self.ffn_norm(x)))),)


def documents(batch) -> torch.Tensor:
    """(B, S): the number of the document in its row that each position is of."""
    ids = batch.get("document_ids", torch.zeros_like(batch["input_ids"]))
    return F.pad((ids.diff() != 0).cumsum(-1), (1, 0))


class SlidingWindow(nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, q, k, v, document):
        """(B, H, S, E) three times, and (B, S) -> (B, H, S, E)."""
        position = torch.arange(q.shape[2], device=q.device)
        distance = position[:, None] - position
        near = (distance >= 0) & (distance < self.window)
        seen = near & (document[:, :, None] == document[:, None, :])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])

    def flops(self, dim: int, heads: int, seq_len: int) -> float:
        """A token: scores and sums, 2 x 2 an element and position seen, and twice that for the backward pass."""
        window = min(self.window, seq_len)
        seen = window - window * (window - 1) / 2 / seq_len  # the first ones see fewer
        return 3 * 4 * dim * seen


class LinearAttention(nn.Module):
    chunk = 64
    """Positions that are worked on together. It changes rounding only."""

    def forward(self, q, k, v, document):
        """y_t = f(q_t) Σ f(k_s) v_s / f(q_t) Σ f(k_s), over the s <= t of t's document; shapes as above.

        Chunk by chunk: all pairs within one, and the sums (E, E + 1) that those before it have left.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k = (F.elu(x.to(wide)) + 1 for x in (q, k))
        v = F.pad(v.to(wide), (0, 1), value=1.0)  # a column of ones, whose sum is the denominator
        sums, of, outputs = 0 * k[:, :, 0, :, None] * v[:, :, 0, None], document[:, :1], []
        chunks = (x.split(self.chunk, dim=2) for x in (q, k, v, document[:, None, :, None]))
        for q, k, v, number in zip(*chunks, strict=True):
            pairs = (number == number.mT).tril()
            outputs.append(q @ k.mT * pairs @ v + q @ sums * (number == of[..., None, None]))
            last = number[:, :, -1, 0]
            goes_on = number == last[..., None, None]
            sums = sums * (of == last)[..., None, None] + (k * goes_on).mT @ v
            of = last
        y = torch.cat(outputs, dim=2)
        return y[..., :-1] / y[..., -1:]

    def flops(self, dim: int, heads: int, seq_len: int) -> float:
        """A token: writing the sums and reading them, 2 x 2 an element, and twice that for the backward pass."""
        return 3 * 4 * dim * (dim / heads)
