"""A linear attention of one file, exact under every layout: retention with learned decays (Sun et al. 2023).

    [model.attention]
    type = "./retention.py:Retention"
    heads = 4

A head keeps a matrix S, which becomes g S + k vᵀ at each position, and reads Sᵀ q. What positions have to do with each
other is in one module, `Recurrence`, whose heads do not depend on one another: so `tp` and `cp` can divide them, and
nothing else has to know of either. Shapes: B sequences, S positions, C of them in a chunk, H heads of E elements.
"""

from __future__ import annotations

import torch
from attrs import field, frozen
from attrs.validators import gt
from torch import nn
from torch.nn import functional as F

from forge_core import Problem
from forge_kit.nn.modules import Linear
from forge_plugin_transformer import AttentionComponent


@frozen(kw_only=True)
class Retention(AttentionComponent):
    """o(recurrence(q(x), k(x), v(x))), without an encoding of positions."""

    heads: int = field(default=8, validator=gt(0))
    """H."""

    def problems(self, job, layout):
        if self.heads % layout.tp:
            yield Problem("heads", f"{self.heads} does not divide by the tensor-parallel degree {layout.tp}")

    def width_problems(self, dim):
        if dim % self.heads:
            yield Problem("heads", f"{self.heads} does not divide the width of the model, {dim}")

    def build(self, context, dim, init):
        return RetentionLayer(dim, self.heads, init)


class RetentionLayer(nn.Module):
    def __init__(self, dim: int, heads: int, init) -> None:
        super().__init__()
        self.width = dim // heads
        self.q, self.k, self.v = (Linear(dim, dim, std=init.inner) for _ in range(3))
        self.decay = Decay(heads)
        self.recurrence = Recurrence()
        self.o = Linear(dim, dim, std=init.residual)

    def forward(self, x, batch, cache=None):
        tensors = [part(x).unflatten(-1, (-1, self.width)) for part in (self.q, self.k, self.v)]
        further = () if cache is None else (cache,)
        return self.o(self.recurrence(tensors, [self.decay(x.dtype)], batch, *further).flatten(2))

    def new_cache(self, batch_size: int, length: int) -> State:
        return State()

    def tensor_parallel_plan(self):
        """Ranks divide the heads."""
        return {"": "whole_input", **dict.fromkeys(("q", "k", "v", "decay"), "column"), "o": "row"}

    def sequence_mixers(self):
        """`cp` divides the heads, too: while the recurrence runs, a rank has all positions of some of them."""
        return {"recurrence": self.decay.weight.shape[0]}

    def parameter_roles(self):
        return {"decay.weight": "bias"}  # no weight decay


class Decay(nn.Module):
    """The logit of each head's g, drawn so that heads remember from 7 to 150 positions."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    def init_parameter(self, name, fill):
        fill.uniform(2.0, 5.0)

    def init_buffers(self, device):
        """There are none."""

    def forward(self, dtype):
        """In the compute dtype first, in which FSDP gathers weights; the recurrence is in float32 or wider."""
        return self.weight.to(dtype).to(torch.promote_types(dtype, torch.float32))


class State:
    """What generation keeps: S (B, H, E, E), whatever the length of the text."""

    value = None


class Recurrence(nn.Module):
    """A `forge_kit.nn.head_mixers.MixesHeads`."""

    mixes_heads = True
    chunk = 32
    """Positions that are computed at a time, as matrix products. It changes rounding alone."""

    def forward(self, tensors, per_head, batch, cache=None):
        """q, k, v (B, S, H, E) and decays (H,) -> (B, S, H, E). With a cache, each row is one document."""
        wide = per_head[0].dtype
        q, k, v = (tensor.to(wide).transpose(1, 2) for tensor in tensors)  # (B, H, S, E)
        document = documents(batch, q) if cache is None else torch.zeros_like(q[:, 0, :, 0])
        if cache is not None and "positions" in batch:
            k = k * (batch["positions"] >= 0)[:, None, :, None]  # padding is not remembered
        log = F.logsigmoid(per_head[0])[:, None]
        state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
        state = state if cache is None or cache.value is None else cache.value
        of, outputs = document[:, :1], []  # the document that the state is of
        parts = (tensor.split(self.chunk, 2) for tensor in (q, k, v, document[:, None]))
        for q, k, v, number in zip(*parts, strict=True):
            count = torch.arange(1, q.shape[2] + 1, device=q.device)
            distance = count[:, None] - count
            same = (number[..., None] == number[..., None, :]) & (distance >= 0)
            weights = (log[..., None] * distance.clamp(min=0)).exp() * same
            since = (log * count).exp()[..., None] * (number == of[:, None])[..., None]
            outputs.append((q @ k.mT * weights) @ v + q @ state * since)
            last = number[..., -1:]
            until = (log * (len(count) - count)).exp()[..., None] * (number == last)[..., None]
            state = since[..., -1:, :] * state + (k * until).mT @ v
            of = last[:, 0]
        if cache is not None:
            cache.value = state
        return torch.cat(outputs, 2).transpose(1, 2).to(tensors[0].dtype)


def documents(batch, like):
    """(B, S): the number of the document in its row that each position is of."""
    if "document_ids" not in batch:
        return torch.zeros_like(like[:, 0, :, 0])
    return F.pad((batch["document_ids"].diff() != 0).cumsum(-1), (1, 0))
