"""Attention `gated_deltanet`."""

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
class GatedDeltaNet(AttentionComponent):
    """The gated delta rule (Yang et al. 2024, arXiv 2412.06464, equation 10), in the form of Qwen3-Next.

    A head keeps a matrix S of `head_dim` x `value_dim` numbers. Each position lets it decay by α, replaces what S gives
    for its key k by its value v, in the share β, and reads it by its query q:

        S ← α S;  S ← S + k (β (v - Sᵀ k))ᵀ;  o = Sᵀ q / √head_dim

    Memory of generation does not grow with the text, and time grows linearly with a sequence. Queries, keys and values
    go through a causal convolution over the last `conv` positions and silu; queries and keys have length 1. There is no
    encoding of positions. State and convolution begin empty with each document, where the batch has `document_ids`.
    """

    heads: int = field(default=8, validator=gt(0))
    """Heads of values, each with a state."""
    key_heads: int = field(default=0, validator=ge(0))
    """Heads of queries and keys, each for `heads` / `key_heads` heads of values; 0: as many as `heads`."""
    head_dim: int = field(default=0, validator=ge(0))
    """Width of a head's queries and keys; 0: the width of the model / `heads`."""
    value_dim: int = field(default=0, validator=ge(0))
    """Width of a head's values; 0: `head_dim`."""
    conv: int = field(default=4, validator=gt(0))
    """Positions of the convolution, the present one included; 1: a factor for each feature."""
    norm_eps: float = field(default=1e-6, validator=gt(0), metadata=when_resumed("flag"))
    """Added to the mean square where each head's output is RMS-normalised."""
    chunk: int = field(default=64, validator=gt(0), metadata=when_resumed("safe"))
    """Positions that are computed at a time, as matrix products; it changes rounding alone."""
    kernel: KernelOrAuto = field(default="auto", metadata=when_resumed("safe"))
    """What computes the recurrence in training. torch: products of chunks. fla: the Triton kernels of the package
    flash-linear-attention, on a GPU in half precision. auto: fla where it is installed and runs."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks heads of values against heads of keys, and these against the tensor-parallel degree."""
        keys = self.key_heads or self.heads
        if self.heads % keys:
            yield Problem("key_heads", f"{keys} does not divide heads = {self.heads}")
        if keys % layout.tp:
            name = "key_heads" if self.key_heads else "heads"
            yield Problem(name, f"{keys} does not divide by the tensor-parallel degree {layout.tp}")

    def width_problems(self, dim: int) -> Iterable[Problem]:
        """Checks that a width follows from the model's, unless there is `head_dim`."""
        if not self.head_dim and dim % self.heads:
            yield Problem("heads", f"{self.heads} does not divide the width of the model, {dim}; set head_dim")

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        """Returns a `GatedDeltaAttention`."""
        from forge_plugin_linear_attention.modules.attention import GatedDeltaAttention

        width = self.head_dim or dim // self.heads
        return GatedDeltaAttention(
            dim,
            heads=self.heads,
            key_heads=self.key_heads or self.heads,
            key_dim=width,
            value_dim=self.value_dim or width,
            conv=self.conv,
            norm_eps=self.norm_eps,
            chunk=self.chunk,
            choice=choose_kernel(self.kernel, context),
            init=init,
        )
