"""The module of `kda`.

Shapes: B sequences, S positions, D model width, H heads, K and V widths of a head's keys and values, R width of the
gates' projections, W positions that a convolution sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from forge_kit.nn.causal_convolution import numbered
from forge_kit.nn.modules import Linear
from forge_plugin_linear_attention.modules.attention import LOG_RATES, OFFSETS, PerHead
from forge_plugin_linear_attention.modules.cache import StateCache
from forge_plugin_linear_attention.modules.channel_delta_rule import BLOCK, channel_delta_rule
from forge_plugin_linear_attention.modules.core import convolve, softplus, unit
from forge_plugin_linear_attention.modules.fla_kernels import read_by_fla
from forge_plugin_transformer.modules.norms import RootMeanSquareNorm

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Role
    from forge_plugin_linear_attention.kernels import KernelChoice
    from forge_plugin_transformer.kinds import InitStd


class KimiDeltaCore(nn.Module):
    """Maps projections of all positions to what each head reads; see `forge_kit.nn.head_mixers.MixesHeads`."""

    mixes_heads = True

    def __init__(self, chunk: int, choice: KernelChoice) -> None:
        super().__init__()
        self.chunk, self.choice = chunk, choice

    def forward(
        self,
        tensors: Sequence[Tensor],
        per_head: Sequence[Tensor],
        batch: Batch,
        cache: StateCache | None = None,
    ) -> Tensor:
        """Returns (B, S, H, V).

        Args:
            tensors: queries and keys (B, S, H, K), values (B, S, H, V), inputs of the decay (B, S, H, K) and of β
                (B, S, H).
            per_head: weights of the convolutions of queries and keys (H, K, W) and of values (H, V, W), and of the
                decay: the logarithm of its rate (H,), and the offset of its input (H, K).
            batch: `document_ids` (B, S), if documents are apart.
            cache: positions before these ones, which is extended; then each row is one document.
        """
        *projected, step, share = tensors
        *filters, log_rate, offset = per_head
        # As wide as norms are computed: the state adds up contributions of all positions
        wide = torch.promote_types(step.dtype, torch.float32)
        documents = numbered(batch["document_ids"]) if cache is None and "document_ids" in batch else None
        used = None
        if cache is None:
            q, k, v = (convolve(x, w, documents) for x, w in zip(projected, filters, strict=True))
        else:
            projected, used = cache.hide_padding(projected, batch)
            q, k, v = cache.convolved(projected, filters)
        log_decay = -log_rate.to(wide).exp()[:, None] * softplus(step.to(wide) + offset.to(wide))
        beta = share.to(wide).sigmoid()
        if used is not None:  # padding neither decays nor writes
            log_decay, beta = log_decay * used[..., None], beta * used
        q, k = unit(q.to(wide)) * q.shape[-1] ** -0.5, unit(k.to(wide))
        if cache is None and self.choice.kernel == "fla":
            return read_by_fla("kda", q, k, v, log_decay, batch, beta)
        q, k, values, log_decay, beta = (x.transpose(1, 2) for x in (q, k, v.to(wide), log_decay, beta))
        state = None if cache is None else cache.state
        read, state = channel_delta_rule(q, k, values, log_decay, beta, documents, state, self.chunk)
        if cache is not None:
            cache.state = state
        return read.transpose(1, 2).to(v.dtype)


class KimiDeltaAttention(nn.Module):
    """o(norm(delta(q(x), k(x), v(x))) sigmoid(gate(x))): see `forge_plugin_transformer.kinds.AttentionComponent`."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        key_dim: int,
        value_dim: int,
        rank: int,
        conv: int,
        norm_eps: float,
        chunk: int,
        choice: KernelChoice,
        init: InitStd,
    ) -> None:
        """Set up the layer.

        Args:
            dim: D.
            heads: H.
            key_dim: K.
            value_dim: V.
            rank: R.
            conv: W.
            norm_eps: added to the mean square of each head's output.
            chunk: positions that are computed at a time.
            choice: the kernel of the recurrence.
            init: deviations of matrices.
        """
        super().__init__()
        self.heads, self.key_dim, self.value_dim, self.chunk = heads, key_dim, value_dim, chunk
        self.q = Linear(dim, heads * key_dim, std=init.inner)
        self.k = Linear(dim, heads * key_dim, std=init.inner)
        self.v = Linear(dim, heads * value_dim, std=init.inner)
        self.step_down = Linear(dim, rank, std=init.inner)
        self.step_up = Linear(rank, heads * key_dim, std=init.inner)
        self.gate_down = Linear(dim, rank, std=init.inner)
        self.gate_up = Linear(rank, heads * value_dim, std=init.inner)
        self.beta = Linear(dim, heads, std=init.inner)
        self.o = Linear(heads * value_dim, dim, std=init.residual)
        bound = conv**-0.5  # as torch draws the weights of a convolution with `conv` inputs
        self.q_conv = PerHead(heads * key_dim, conv, low=-bound, high=bound)
        self.k_conv = PerHead(heads * key_dim, conv, low=-bound, high=bound)
        self.v_conv = PerHead(heads * value_dim, conv, low=-bound, high=bound)
        self.log_rate = PerHead(heads, low=LOG_RATES[0], high=LOG_RATES[1])
        self.offset = PerHead(heads * key_dim, low=OFFSETS[0], high=OFFSETS[1])
        self.norm = RootMeanSquareNorm(value_dim, eps=norm_eps)
        self.core = KimiDeltaCore(chunk, choice)

    def forward(self, x: Tensor, batch: Batch, cache: StateCache | None = None) -> Tensor:
        """(B, S, D) -> (B, S, D). `batch` may hold `document_ids`, (B, S)."""
        widths = self.key_dim, self.key_dim, self.value_dim
        projected = [
            projection(x).unflatten(-1, (-1, width))
            for projection, width in zip((self.q, self.k, self.v), widths, strict=True)
        ]
        step = self.step_up(self.step_down(x)).unflatten(-1, (-1, self.key_dim))
        filters = [
            conv(x.dtype).unflatten(0, (-1, width))
            for conv, width in zip((self.q_conv, self.k_conv, self.v_conv), widths, strict=True)
        ]
        offset = self.offset(x.dtype).unflatten(0, (-1, self.key_dim))
        further = () if cache is None else (cache,)
        per_head = [*filters, self.log_rate(x.dtype), offset]
        mixed = self.norm(self.core([*projected, step, self.beta(x)], per_head, batch, *further))
        gate = self.gate_up(self.gate_down(x)).unflatten(-1, (-1, self.value_dim))
        return self.o((mixed * gate.sigmoid()).flatten(2))

    def new_cache(self, batch_size: int, length: int) -> StateCache:
        """Returns an empty cache, of a size that does not depend on `length`."""
        return StateCache()

    def flops(self, seq_len: int) -> float:
        """Counts 6 a weight, and 6 a product of the chunked rule: three with the state, and those within a chunk."""
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, Linear))
        filters = sum(conv.weight.numel() for conv in (self.q_conv, self.k_conv, self.v_conv))
        key, value, chunk = self.key_dim, self.value_dim, min(self.chunk, seq_len)
        # Products of keys, and of queries and keys, across blocks and within one; products with what was written; and
        # half as many in the triangular system
        within = 2 * key * (chunk + min(BLOCK, chunk)) + chunk * value + chunk * (key + value) / 2
        return 6.0 * (weights + filters + self.heads * (3 * key * value + within))

    def backend_choices(self, seq_len: int) -> Sequence[tuple[str, str, str]]:
        """Returns the kernel of the recurrence; nothing on a CPU, or for a core that a stage has replaced."""
        choice = getattr(self.core, "choice", None)
        return [] if choice is None else choice.described()

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        """Ranks divide the heads. Narrow projections of the gates are whole on all ranks, and the norm of a head."""
        columns = ("q", "k", "v", "step_up", "gate_up", "beta", "q_conv", "k_conv", "v_conv", "log_rate", "offset")
        whole = dict.fromkeys(("step_down", "gate_down", "norm"), "replicate")
        return {"": "whole_input", **dict.fromkeys(columns, "column"), "o": "row", **whole}

    def float8_exempt(self) -> Sequence[str]:
        """Narrow projections: under tp each rank has a part of their gradient, and would round it separately."""
        return ["step_down", "gate_down"]

    def parameter_roles(self) -> Mapping[str, Role]:
        """Makes the convolutions' filters a norm, and numbers of heads a bias: no matrix that an optimizer may turn."""
        filters = dict.fromkeys(("q_conv.weight", "k_conv.weight", "v_conv.weight"), "norm")
        return {**filters, "log_rate.weight": "bias", "offset.weight": "bias"}

    def sequence_mixers(self) -> Mapping[str, int]:
        """Names the core, whose heads ranks share under `cp`."""
        return {"core": self.heads}
