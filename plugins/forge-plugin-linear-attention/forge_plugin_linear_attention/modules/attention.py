"""The module of `gated_deltanet`.

Shapes: B sequences, S positions, D model width, G heads of keys, H heads of values, K and V their widths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_kit.nn.modules import Linear, cast
from forge_plugin_linear_attention.modules.cache import StateCache
from forge_plugin_linear_attention.modules.core import DeltaCore
from forge_plugin_transformer.modules.norms import RootMeanSquareNorm

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Fill, Role
    from forge_plugin_linear_attention.kernels import KernelChoice
    from forge_plugin_transformer.kinds import InitStd

LOG_RATES = 0.0, 2.7726
"""Initial logarithms of the rates of decay are uniform between these: rates between 1 and 16."""
OFFSETS = -6.9, -2.25
"""Initial offsets of the decay are uniform between these: softplus gives steps between 0.001 and 0.1, evenly in their
logarithm (Gu and Dao 2023, "Mamba", section 3.6)."""


class PerHead(nn.Module):
    """Numbers of each head, drawn evenly from a range. A module, which tensor parallel splits like its heads."""

    def __init__(self, *shape: int, low: float, high: float) -> None:
        super().__init__()
        self.low, self.high = low, high
        self.weight = nn.Parameter(torch.empty(shape))

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Fills `weight`."""
        fill.uniform(self.low, self.high)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, dtype: torch.dtype) -> Tensor:
        """Returns the numbers in `dtype`; with tensor parallel, of this rank's heads."""
        return cast(self.weight, dtype)


class GatedDeltaAttention(nn.Module):
    """o(norm(delta(q(x), k(x), v(x))) silu(gate(x))): see `forge_plugin_transformer.kinds.AttentionComponent`."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        key_heads: int,
        key_dim: int,
        value_dim: int,
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
            key_heads: G.
            key_dim: K.
            value_dim: V.
            conv: positions of the convolutions.
            norm_eps: added to the mean square of each head's output.
            chunk: positions that are computed at a time.
            choice: the kernel of the recurrence.
            init: deviations of matrices.
        """
        super().__init__()
        self.key_heads, self.key_dim, self.value_dim, self.chunk = key_heads, key_dim, value_dim, chunk
        self.q = Linear(dim, key_heads * key_dim, std=init.inner)
        self.k = Linear(dim, key_heads * key_dim, std=init.inner)
        self.v = Linear(dim, heads * value_dim, std=init.inner)
        self.gate = Linear(dim, heads * value_dim, std=init.inner)
        self.step = Linear(dim, heads, std=init.inner)
        self.beta = Linear(dim, heads, std=init.inner)
        self.o = Linear(heads * value_dim, dim, std=init.residual)
        bound = conv**-0.5  # as torch draws the weights of a convolution with `conv` inputs
        self.q_conv = PerHead(key_heads * key_dim, conv, low=-bound, high=bound)
        self.k_conv = PerHead(key_heads * key_dim, conv, low=-bound, high=bound)
        self.v_conv = PerHead(heads * value_dim, conv, low=-bound, high=bound)
        self.log_rate = PerHead(heads, low=LOG_RATES[0], high=LOG_RATES[1])
        self.offset = PerHead(heads, low=OFFSETS[0], high=OFFSETS[1])
        self.norm = RootMeanSquareNorm(value_dim, eps=norm_eps)
        self.core = DeltaCore(chunk, choice)

    def forward(self, x: Tensor, batch: Batch, cache: StateCache | None = None) -> Tensor:
        """(B, S, D) -> (B, S, D). `batch` may hold `document_ids`, (B, S)."""
        tensors = [
            *(self._heads(projection(x), self.key_dim) for projection in (self.q, self.k)),
            self._heads(self.v(x), self.value_dim),
            self.step(x),
            self.beta(x),
        ]
        per_head = [
            *(self._filters(conv(x.dtype), self.key_dim) for conv in (self.q_conv, self.k_conv)),
            self._filters(self.v_conv(x.dtype), self.value_dim),
            self.log_rate(x.dtype),
            self.offset(x.dtype),
        ]
        further = () if cache is None else (cache,)
        mixed = self.norm(self.core(tensors, per_head, batch, *further))
        return self.o((mixed * F.silu(self._heads(self.gate(x), self.value_dim))).flatten(2))

    def _heads(self, x: Tensor, width: int) -> Tensor:
        return x.unflatten(-1, (-1, width))

    def _filters(self, weight: Tensor, width: int) -> Tensor:
        return weight.unflatten(0, (-1, width))

    def new_cache(self, batch_size: int, length: int) -> StateCache:
        """Returns an empty cache, of a size that does not depend on `length`."""
        return StateCache()

    def flops(self, seq_len: int) -> float:
        """Counts 6 a weight, and 6 a product of the chunked rule: three with the state, and those within a chunk."""
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, Linear))
        filters = sum(conv.weight.numel() for conv in (self.q_conv, self.k_conv, self.v_conv))
        key, value, chunk = self.key_dim, self.value_dim, min(self.chunk, seq_len)
        # Products of keys, of queries and keys, and with what was written; and half as many in the triangular system
        within = chunk * (2 * key + value) + chunk * (key + value) / 2
        return 6.0 * (weights + filters + self.step.out_features * (3 * key * value + within))

    def backend_choices(self, seq_len: int) -> Sequence[tuple[str, str, str]]:
        """Returns the kernel of the recurrence; nothing on a CPU, or for a core that a stage has replaced."""
        choice = getattr(self.core, "choice", None)
        return [] if choice is None else choice.described()

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        """Ranks divide the heads; the norm of each head is whole on all ranks."""
        columns = ("q", "k", "v", "gate", "step", "beta", "q_conv", "k_conv", "v_conv", "log_rate", "offset")
        return {"": "whole_input", **dict.fromkeys(columns, "column"), "o": "row", "norm": "replicate"}

    def parameter_roles(self) -> Mapping[str, Role]:
        """Makes the convolutions' filters a norm, and numbers of heads a bias: no matrix that an optimizer may turn."""
        filters = dict.fromkeys(("q_conv.weight", "k_conv.weight", "v_conv.weight"), "norm")
        return {**filters, "log_rate.weight": "bias", "offset.weight": "bias"}

    def sequence_mixers(self) -> Mapping[str, int]:
        """Names the core, whose heads of keys ranks share under `cp`."""
        return {"core": self.key_heads}
