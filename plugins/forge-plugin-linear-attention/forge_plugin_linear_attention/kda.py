"""Attention `kda`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, gt

from forge_core.contracts.components import when_resumed
from forge_core.contracts.errors import Problem
from forge_plugin_linear_attention.kernels import KernelOrAuto, choose_kernel
from forge_plugin_transformer import AttentionComponent, InitStd

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


@frozen(kw_only=True)
class KDA(AttentionComponent):
    """Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692, equation 1).

    As `gated_deltanet`, with a decay α for each feature of the keys in place of one for a head: a head keeps a matrix S
    of `head_dim` x `value_dim` numbers, whose rows decay apart from one another:

        S ← diag(α) S;  S ← S + k (β (v - Sᵀ k))ᵀ;  o = Sᵀ q / √head_dim

    The decay and the gate behind each head are projected from x through `rank` features. Queries, keys and values go
    through a causal convolution over the last `conv` positions and silu; queries and keys have length 1. There is no
    encoding of positions. State and convolution begin empty with each document, where the batch has `document_ids`.
    """

    heads: int = field(default=8, validator=gt(0))
    """Heads, each with a state."""
    head_dim: int = field(default=0, validator=ge(0))
    """Width of a head's queries and keys; 0: the width of the model / `heads`."""
    value_dim: int = field(default=0, validator=ge(0))
    """Width of a head's values; 0: `head_dim`."""
    rank: int = field(default=0, validator=ge(0))
    """Features through which the decay and the gate are projected; 0: `value_dim`."""
    conv: int = field(default=4, validator=gt(0))
    """Positions of the convolution, the present one included; 1: a factor for each feature."""
    norm_eps: float = field(default=1e-5, validator=gt(0), metadata=when_resumed("flag"))
    """Added to the mean square where each head's output is RMS-normalised."""
    chunk: int = field(default=32, validator=gt(0), metadata=when_resumed("safe"))
    """Positions that are computed at a time, a multiple of 8 for speed; it changes rounding alone."""
    kernel: KernelOrAuto = field(default="auto", metadata=when_resumed("safe"))
    """What computes the recurrence in training. torch: products of chunks. fla: the Triton kernels of the package
    flash-linear-attention, on a GPU in half precision. auto: fla where it is installed and runs."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks heads against the tensor-parallel degree."""
        if self.heads % layout.tp:
            yield Problem("heads", f"{self.heads} does not divide by the tensor-parallel degree {layout.tp}")

    def width_problems(self, dim: int) -> Iterable[Problem]:
        """Checks that a width follows from the model's, unless there is `head_dim`."""
        if not self.head_dim and dim % self.heads:
            yield Problem("heads", f"{self.heads} does not divide the width of the model, {dim}; set head_dim")

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        """Returns a `KimiDeltaAttention`."""
        from forge_plugin_linear_attention.modules.kimi_delta import KimiDeltaAttention

        width = self.head_dim or dim // self.heads
        values = self.value_dim or width
        return KimiDeltaAttention(
            dim,
            heads=self.heads,
            key_dim=width,
            value_dim=values,
            rank=self.rank or values,
            conv=self.conv,
            norm_eps=self.norm_eps,
            chunk=self.chunk,
            choice=choose_kernel(self.kernel, context),
            init=init,
        )
