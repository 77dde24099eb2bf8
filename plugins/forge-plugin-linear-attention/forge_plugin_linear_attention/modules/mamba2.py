"""The module of `mamba2`.

Shapes: B sequences, S positions, D model width, G groups, H heads of width P, K width of the state, W positions of the
convolution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_kit.nn.causal_convolution import numbered
from forge_kit.nn.head_mixers import sharing_ranks
from forge_kit.nn.modules import Linear, cast
from forge_plugin_linear_attention.modules.attention import LOG_RATES, OFFSETS, PerHead
from forge_plugin_linear_attention.modules.cache import StateCache
from forge_plugin_linear_attention.modules.core import convolve, softplus
from forge_plugin_linear_attention.modules.fla_kernels import read_by_fla
from forge_plugin_linear_attention.modules.ssd import state_space
from forge_plugin_transformer.modules.norms import RootMeanSquareNorm, SplitRootMeanSquareNorm

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Fill, Role
    from forge_plugin_linear_attention.kernels import KernelChoice
    from forge_plugin_transformer.kinds import InitStd

INPUTS = ("x", "b", "c")
"""Projections that go through a convolution."""


class StateSpaceCore(nn.Module):
    """Maps projections of all positions to what each head reads; see `forge_kit.nn.head_mixers.MixesHeads`."""

    mixes_heads = True

    def __init__(self, dt_limit: tuple[float, float], chunk: int, choice: KernelChoice) -> None:
        super().__init__()
        self.dt_limit, self.chunk, self.choice = dt_limit, chunk, choice

    def forward(
        self,
        tensors: Sequence[Tensor],
        per_head: Sequence[Tensor],
        batch: Batch,
        cache: StateCache | None = None,
    ) -> Tensor:
        """Returns (B, S, H, P).

        Args:
            tensors: x (B, S, H, P), b and c (B, S, G, K), and inputs of the step (B, S, H).
            per_head: of each head (H,): the logarithm of its rate, an offset of the input of its step, and the
                factor on its x that is added to its result; weights of the convolutions of x (H, P, W), of b and of
                c (G, K, W); their biases without W, if they have any.
            batch: `document_ids` (B, S), if documents are apart.
            cache: positions before these ones, which is extended; then each row is one document.
        """
        *projected, step = tensors
        log_rate, offset, skip, *convolutions = per_head
        filters = convolutions[:3]
        biases: Sequence[Tensor | None] = convolutions[3:] or [None] * 3
        # As wide as norms are computed: the state adds up contributions of all positions
        wide = torch.promote_types(step.dtype, torch.float32)
        step = softplus(step.to(wide) + offset.to(wide))
        low, high = self.dt_limit
        if low or high:
            step = step.clamp(low, high or None)
        documents = numbered(batch["document_ids"]) if cache is None and "document_ids" in batch else None
        if cache is None:
            arguments = zip(projected, filters, biases, strict=True)
            x, b, c = (convolve(tensor, weight, documents, bias=bias) for tensor, weight, bias in arguments)
        else:
            projected, used = cache.hide_padding(projected, batch)
            x, b, c = cache.convolved(projected, filters, biases)
            step = step if used is None else step * used  # padding neither decays nor writes
        inner = x.to(wide)
        rate = log_rate.to(wide).exp()
        if cache is None and self.choice.kernel == "fla":
            # The kernel has heads of keys for each head of values
            b, c = (part.repeat_interleave(x.shape[2] // part.shape[2], 2) for part in (b, c))
            # Mamba-2 is this rule with q = c, k = b, v = Δ x and log α = -rate Δ
            read = read_by_fla("simple_gla", c, b, (inner * step[..., None]).to(x.dtype), -rate * step, batch).to(wide)
        else:
            state = None if cache is None else cache.state
            read, state = state_space(inner, b.to(wide), c.to(wide), step, rate, documents, state, self.chunk)
            if cache is not None:
                cache.state = state
        return torch.addcmul(read, inner, skip.to(wide)[:, None]).to(x.dtype)


class GroupedNorm(RootMeanSquareNorm):
    """An RMS norm of each group of features, with a weight for each feature. Ranks may divide the groups."""

    def __init__(self, dim: int, groups: int, *, eps: float) -> None:
        super().__init__(dim, eps=eps)
        self.width = dim // groups

    def forward(self, x: Tensor) -> Tensor:
        """(…, D or this rank's features) to the same."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, self.width))
        scale = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (wide * scale).flatten(-2).to(x.dtype) * cast(self.weight, x.dtype)


class Skip(PerHead):
    """A factor for each head, 1 at first."""

    def __init__(self, heads: int) -> None:
        super().__init__(heads, low=1.0, high=1.0)

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Fills `weight`."""
        fill.constant(1.0)


class Sizes(NamedTuple):
    """Numbers and widths in a layer."""

    heads: int
    """H."""
    width: int
    """P."""
    groups: int
    """G."""
    state: int
    """K."""
    conv: int
    """W."""


class OutputNorm(NamedTuple):
    """The norm of what the core returns, and where it is."""

    way: str
    """ "after" or "before" the gate, or "none"."""
    groups: int
    """Groups of features that are normalised apart."""
    eps: float
    """Added to their mean square."""

    def build(self, features: int) -> nn.Module:
        """Returns the norm. Ranks divide groups; where there is one, they add up its squares."""
        if self.groups == 1:
            return SplitRootMeanSquareNorm(features, eps=self.eps)
        return GroupedNorm(features, self.groups, eps=self.eps)


class Mamba2Mixer(nn.Module):
    """o(norm(core(x(·), b(·), c(·), step(·)) silu(gate(·)))).

    See `forge_plugin_transformer.kinds.AttentionComponent` for the contract.
    """

    def __init__(
        self,
        dim: int,
        *,
        sizes: Sizes,
        conv_bias: bool,
        bias: bool,
        norm: OutputNorm,
        multipliers: tuple[float, ...],
        core: StateSpaceCore,
        init: InitStd,
    ) -> None:
        """Set up the layer.

        Args:
            dim: D.
            sizes: H, P, G, K and W.
            conv_bias: whether the convolutions have biases.
            bias: whether the projections have some.
            norm: of what the core returns.
            multipliers: factors on the projections of gate, x, b, c and step.
            core: convolves and mixes positions.
            init: deviations of matrices.
        """
        super().__init__()
        self.head_dim, self.groups, self.state, self.chunk = sizes.width, sizes.groups, sizes.state, core.chunk
        self.norm_way, self.norm_groups = norm.way, norm.groups
        self.multipliers = dict(zip(("gate", *INPUTS, "step"), multipliers, strict=True))
        inner = sizes.heads * sizes.width
        widths = dict(zip(INPUTS, (inner, *[sizes.groups * sizes.state] * 2), strict=True))
        for name, width in widths.items():
            self.add_module(name, Linear(dim, width, bias=bias, std=init.inner))
        self.gate = Linear(dim, inner, bias=bias, std=init.inner)
        self.step = Linear(dim, sizes.heads, bias=bias, std=init.inner)
        self.o = Linear(inner, dim, bias=bias, std=init.residual)
        self._add_filters(widths, sizes.conv, bias=conv_bias)
        self.log_rate = PerHead(sizes.heads, low=LOG_RATES[0], high=LOG_RATES[1])
        self.offset = PerHead(sizes.heads, low=OFFSETS[0], high=OFFSETS[1])
        self.skip = Skip(sizes.heads)
        if norm.way != "none":
            self.norm = norm.build(inner)
        self.core = core

    def _add_filters(self, widths: Mapping[str, int], conv: int, *, bias: bool) -> None:
        bound = conv**-0.5  # as torch draws the weights of a convolution with `conv` inputs
        for name, width in widths.items():
            self.add_module(f"{name}_conv", PerHead(width, conv, low=-bound, high=bound))
        self.conv_biases = [f"{name}_conv_bias" for name in INPUTS] if bias else []
        # Not strict: without biases there are no names
        for name, width in zip(self.conv_biases, widths.values(), strict=False):
            self.add_module(name, PerHead(width, low=-bound, high=bound))

    def forward(self, x: Tensor, batch: Batch, cache: StateCache | None = None) -> Tensor:
        """(B, S, D) -> (B, S, D). `batch` may hold `document_ids`, (B, S)."""
        per_head = [part(x.dtype) for part in (self.log_rate, self.offset, self.skip)]
        tensors = [self._heads(name, self._projected(name, x), -1) for name in INPUTS]
        per_head += [self._heads(name, self.get_submodule(f"{name}_conv")(x.dtype), 0) for name in INPUTS]
        named = zip(INPUTS, self.conv_biases, strict=False)
        per_head += [self._heads(name, self.get_submodule(bias)(x.dtype), 0) for name, bias in named]
        further = () if cache is None else (cache,)
        mixed = self.core([*tensors, self._projected("step", x)], per_head, batch, *further).flatten(2)
        gate = F.silu(self._projected("gate", x))
        if self.norm_way == "before":
            return self.o(self.norm(mixed) * gate)
        mixed = mixed * gate
        return self.o(mixed if self.norm_way == "none" else self.norm(mixed))

    def _projected(self, name: str, x: Tensor) -> Tensor:
        """Returns the projection of this name, times its factor."""
        projected: Tensor = self.get_submodule(name)(x)
        factor = self.multipliers[name]
        return projected if factor == 1 else projected * factor

    def _heads(self, name: str, values: Tensor, dimension: int) -> Tensor:
        """Returns the values of a projection with their heads, or groups, apart: at `dimension`, before their width."""
        apart = values.unflatten(dimension, (-1, self.head_dim if name == "x" else self.state))
        if name == "x" or self.groups > 1:
            return apart
        # All heads need the only group, on each rank that has some of them
        sizes = [-1] * apart.ndim
        sizes[dimension - 1 if dimension else 0] = sharing_ranks(self.core)
        return apart.expand(sizes)

    def new_cache(self, batch_size: int, length: int) -> StateCache:
        """Returns an empty cache, of a size that does not depend on `length`."""
        return StateCache()

    def flops(self, seq_len: int) -> float:
        """Counts 6 a weight, and 6 a product of the chunked rule: two with the state, and those within a chunk."""
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, Linear))
        filters = sum(self.get_parameter(f"{name}_conv.weight").numel() for name in INPUTS)
        chunk, heads = min(self.chunk, seq_len), self.step.out_features
        # Heads of a group share the products of its pairs of positions
        within = heads * chunk * self.head_dim + self.groups * chunk * self.state
        return 6.0 * (weights + filters + heads * 2 * self.state * self.head_dim + within)

    def backend_choices(self, seq_len: int) -> Sequence[tuple[str, str, str]]:
        """Returns the kernel of the recurrence; nothing on a CPU, or for a core that a stage has replaced."""
        choice = getattr(self.core, "choice", None)
        return [] if choice is None else choice.described()

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        """Ranks divide the heads and their groups; a single group is whole on all of them."""
        shared = ("b", "c", "b_conv", "c_conv", *self.conv_biases[1:])
        columns = ("x", "gate", "step", "x_conv", "log_rate", "offset", "skip", *self.conv_biases[:1])
        plan = {"": "whole_input", **dict.fromkeys(columns, "column"), "o": "row"}
        plan |= dict.fromkeys(shared, "replicate" if self.groups == 1 else "column")
        # A single group of the norm has features on all ranks
        norm = {} if self.norm_way == "none" else {"norm": "split_features" if self.norm_groups == 1 else "column"}
        return plan | norm

    def parameter_roles(self) -> Mapping[str, Role]:
        """Makes the convolutions' filters a norm, and numbers of heads a bias: no matrix that an optimizer may turn."""
        numbers = (*self.conv_biases, "log_rate", "offset", "skip")
        filters = {f"{name}_conv.weight": "norm" for name in INPUTS}
        return {**filters, **{f"{name}.weight": "bias" for name in numbers}}  # type: ignore[dict-item]

    def sequence_mixers(self) -> Mapping[str, int]:
        """Names the core, whose groups ranks share under `cp`; where there is one, they share the heads."""
        return {"core": self.step.out_features if self.groups == 1 else self.groups}
