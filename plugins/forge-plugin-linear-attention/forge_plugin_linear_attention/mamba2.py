"""Attention `mamba2`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs import field, frozen
from attrs.validators import deep_iterable, ge, gt

from forge_core.contracts.components import when_resumed
from forge_core.contracts.errors import Problem
from forge_plugin_linear_attention.kernels import KernelOrAuto, choose_kernel
from forge_plugin_transformer import AttentionComponent, InitStd

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


def _bounds(_: Any, attribute: attrs.Attribute[Any], value: tuple[float, float]) -> None:
    """Refuses bounds that no step is between."""
    low, high = value
    if low < 0 or high < 0 or (high and high <= low):
        raise ValueError(f"{attribute.name} must be two bounds, the second one larger or 0 for none, not {value}")


@frozen(kw_only=True)
class Mamba2(AttentionComponent):
    """Mamba-2 (Dao and Gu 2024, arXiv 2405.21060).

    A head keeps a matrix S of `state` x `head_dim` numbers. At each position, its step Δ decides how much S decays and
    how much of x is written at b; c reads, and a share of x is added:

        Δ = softplus(step);  S ← exp(-rate Δ) S + b (Δ x)ᵀ;  y = Sᵀ c + skip x

    Memory of generation does not grow with the text, and time grows linearly with a sequence. x, b and c go through a
    causal convolution over the last `conv` positions and silu. Heads of a group share b and c. There is no encoding of
    positions. State and convolution begin empty with each document, where the batch has `document_ids`.
    """

    heads: int = field(default=8, validator=gt(0))
    """Heads, each with a state."""
    head_dim: int = field(default=0, validator=ge(0))
    """Width of a head; 0: twice the width of the model / `heads`."""
    state: int = field(default=128, validator=gt(0))
    """Width of b and c: a head's state is `state` x `head_dim`."""
    groups: int = field(default=1, validator=gt(0))
    """Groups of heads, each with its b and c."""
    conv: int = field(default=4, validator=gt(0))
    """Positions of the convolution, the present one included; 1: a factor for each feature."""
    conv_bias: bool = True
    """Whether the convolution has biases."""
    bias: bool = False
    """Whether projections have biases."""
    norm: Literal["after", "before", "none"] = "after"
    """RMS norm of what heads read, after the product with the gate, as published models have it, before it, or none."""
    norm_groups: int = field(default=0, validator=ge(0))
    """Groups of features that are normalised apart; 0: `groups`."""
    norm_eps: float = field(default=1e-5, validator=gt(0), metadata=when_resumed("flag"))
    """Added to the mean square of that norm."""
    dt_limit: tuple[float, float] = field(default=(0.0, 0.0), validator=_bounds, metadata=when_resumed("flag"))
    """Smallest and largest step Δ; an upper bound of 0: there is none."""
    multipliers: tuple[float, float, float, float, float] = field(
        default=(1.0,) * 5, validator=deep_iterable(gt(0)), metadata=when_resumed("flag")
    )
    """Factors on what the projections of gate, x, b, c and step return (Falcon-H1: `ssm_multipliers`)."""
    chunk: int = field(default=64, validator=gt(0), metadata=when_resumed("safe"))
    """Positions that are computed at a time, as matrix products; it changes rounding alone."""
    kernel: KernelOrAuto = field(default="auto", metadata=when_resumed("safe"))
    """What computes the recurrence in training. torch: products of chunks. fla: the Triton kernels of the package
    flash-linear-attention, on a GPU in half precision. auto: fla where it is installed and runs."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks heads against groups, and what ranks divide against their number."""
        for name, count in (("groups", self.groups), ("norm_groups", self.norm_groups)):
            if count and self.heads % count:
                yield Problem(name, f"{count} does not divide heads = {self.heads}")
        if self.norm == "none" and self.norm_groups:
            yield Problem("norm_groups", 'there is no norm, as norm = "none"; leave norm_groups out')
        ranks = f"the tensor-parallel degree {layout.tp}"
        if self.heads % layout.tp:
            yield Problem("heads", f"{self.heads} does not divide by {ranks}")
        # Ranks can share a single group, in which each computes b and c for its heads
        if self.groups > 1 and self.groups % layout.tp:
            yield Problem("groups", f"{self.groups} is neither 1 nor divisible by {ranks}")
        apart = 1 if self.norm == "none" else self.norm_groups or self.groups
        if self.norm_groups and apart > 1 and apart % layout.tp:
            yield Problem("norm_groups", f"{apart} is neither 1 nor divisible by {ranks}")

    def width_problems(self, dim: int) -> Iterable[Problem]:
        """Checks that a width follows from the model's, unless there is `head_dim`."""
        if not self.head_dim and 2 * dim % self.heads:
            yield Problem(
                "heads", f"{self.heads} does not divide twice the width of the model, {2 * dim}; set head_dim"
            )

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        """Returns a `Mamba2Mixer`."""
        from forge_plugin_linear_attention.modules.mamba2 import Mamba2Mixer, OutputNorm, Sizes, StateSpaceCore

        return Mamba2Mixer(
            dim,
            sizes=Sizes(self.heads, self.head_dim or 2 * dim // self.heads, self.groups, self.state, self.conv),
            conv_bias=self.conv_bias,
            bias=self.bias,
            norm=OutputNorm(self.norm, self.norm_groups or self.groups, self.norm_eps),
            multipliers=self.multipliers,
            core=StateSpaceCore(self.dt_limit, self.chunk, choose_kernel(self.kernel, context)),
            init=init,
        )
