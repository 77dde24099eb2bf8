"""A minimal PyTorch training loop, as one would write it by hand: SDPA, fused AdamW, autocast, whole logits."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, cos, sin):
        batch, length, dim = x.shape
        q = self.q(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Block(nn.Module):
    def __init__(self, dim, heads, kv_heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, heads, kv_heads)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attention(norm(self.norm1, x), cos, sin)
        h = norm(self.norm2, x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def norm(module, x):
    """The fused kernel needs its weight in the dtype of its input."""
    return F.rms_norm(x, module.normalized_shape, module.weight.to(x.dtype), module.eps)


class LanguageModel(nn.Module):
    def __init__(self, *, vocab, dim, layers, heads, kv_heads, hidden, length, bf16=False, tied=False):
        super().__init__()
        self.bf16 = bf16
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        frequencies = 10000.0 ** (-torch.arange(0, dim // heads, 2) / (dim // heads))
        angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids, labels):
        """Mean cross-entropy in nats; whole logits."""
        x, cos, sin = self.embedding(ids), self.cos, self.sin
        if self.bf16:
            x, cos, sin = x.bfloat16(), cos.bfloat16(), sin.bfloat16()
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(norm(self.norm, x))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def precision(bf16):
    return torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext()


def train(options, batches, tick, clip):
    """Train on `batches` in turn; returns the last loss and the number of parameters."""
    bf16 = options.dtype == "bf16"
    model = LanguageModel(
        vocab=options.vocab,
        dim=options.dim,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv,
        hidden=options.hidden,
        length=options.seq,
        bf16=bf16,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=options.wd, fused=True
    )
    forward = torch.compile(model) if options.compile else model
    for step in range(options.steps):
        batch = batches[step % len(batches)]
        with precision(bf16):
            loss = forward(batch[:, :-1], batch[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tick()
    return loss.item(), sum(p.numel() for p in model.parameters())
