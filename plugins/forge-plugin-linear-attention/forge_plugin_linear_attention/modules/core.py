"""What mixes positions in Gated DeltaNet: the convolution and the delta rule.

Shapes: B sequences, S positions, G heads of keys of width K, H heads of values of width V, W positions that a
convolution sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_kit.nn.causal_convolution import causal_convolution, numbered
from forge_plugin_linear_attention.modules.delta_rule import gated_delta_rule
from forge_plugin_linear_attention.modules.fla_kernels import read_by_fla

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_plugin_linear_attention.kernels import KernelChoice
    from forge_plugin_linear_attention.modules.cache import StateCache

EPS = 1e-6
"""Added to the squared length of queries and keys, as in Qwen3-Next."""


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x))."""
    # Not torch's: where the gradient is not contiguous, its own is neither, and it declares to the compiler that it is
    # (torch 2.13). The compiled backward pass of what has made x fails then
    return torch.logaddexp(x, x.new_zeros(()))


class DeltaCore(nn.Module):
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
            tensors: queries and keys (B, S, G, K), values (B, S, H, V), inputs of the decay and of β (B, S, H).
            per_head: weights of the convolutions of queries and keys (G, K, W) and of values (H, V, W), and of the
                decay (H,): the logarithm of its rate, and what is added to its input.
            batch: `document_ids` (B, S), if documents are apart.
            cache: positions before these ones, which is extended; then each row is one document.
        """
        *projected, step, share = tensors
        *filters, log_rate, offset = per_head
        # As wide as norms are computed: the state adds up contributions of all positions
        wide = torch.promote_types(step.dtype, torch.float32)
        documents = numbered(batch["document_ids"]) if cache is None and "document_ids" in batch else None
        if cache is None:
            q, k, v = (convolve(x, w, documents) for x, w in zip(projected, filters, strict=True))
            used = None
        else:
            projected, used = cache.hide_padding(projected, batch)
            q, k, v = cache.convolved(projected, filters)
        # Each head of queries and keys serves several heads of values
        q, k = (unit(x.to(wide)).repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        q = q * q.shape[-1] ** -0.5
        log_decay = -log_rate.to(wide).exp() * softplus(step.to(wide) + offset.to(wide))
        beta = share.to(wide).sigmoid()
        if used is not None:  # padding neither decays nor writes
            log_decay, beta = log_decay * used, beta * used
        if cache is None and self.choice.kernel == "fla":
            return read_by_fla("gated_delta_rule", q, k, v, log_decay, batch, beta)
        q, k, values, log_decay, beta = (x.transpose(1, 2) for x in (q, k, v.to(wide), log_decay, beta))
        state = None if cache is None else cache.state
        read, state = gated_delta_rule(q, k, values, log_decay, beta, documents, state, self.chunk)
        if cache is not None:
            cache.state = state
        return read.transpose(1, 2).to(v.dtype)


def convolve(
    x: Tensor,
    weight: Tensor,
    documents: Tensor | None,
    before: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Returns silu of the causal convolution of each feature, (B, S, H, E).

    Args:
        x: (B, S, H, E).
        weight: (H, E, W), the present position's last.
        documents: (B, S), the number of each position's document, which sees no other; None: all are one.
        before: (B, W - 1, H, E), what comes before; None: zeros.
        bias: (H, E), added before silu; None: nothing.
    """
    y = causal_convolution(x, weight, documents, before)
    return F.silu(y if bias is None else y + bias)


def unit(x: Tensor) -> Tensor:
    """Returns vectors divided by their lengths."""
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()
