"""Canon layers before the parts of a block. Shapes: B sequences, S positions, D model width, W positions of a kernel.

The part of a block keeps its module, with its names and all that stages ask of it: its class is replaced by one that
is derived from it and computes the Canon layer first. So tensor-parallel ranks gather positions once for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_kit.nn.causal_convolution import ConvolutionCore, TailCache
from forge_kit.nn.derived_class import derived
from forge_kit.nn.modules import cast
from forge_plugin_transformer.modules.cache import LayerCaches

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Fill, Role

CANON, PART = "canon", "part"
"""Names in a cache: of the Canon layer, and of the part behind it if that has a cache."""


class Filters(nn.Module):
    """The weights of the convolution. A module, for which a tensor-parallel plan has a way."""

    def __init__(self, dim: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, kernel))

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Fills the weights as torch does for a convolution with W inputs."""
        bound = self.weight.shape[1] ** -0.5
        fill.uniform(-bound, bound)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, dtype: torch.dtype) -> Tensor:
        """Returns (D, W) in `dtype`."""
        return cast(self.weight, dtype)


class CanonLayer(nn.Module):
    """h + conv(h), or conv(h)."""

    def __init__(self, dim: int, kernel: int, *, residual: bool) -> None:
        super().__init__()
        self.dim, self.residual = dim, residual
        self.filters = Filters(dim, kernel)
        self.core = ConvolutionCore()

    def forward(self, h: Tensor, batch: Batch, cache: TailCache | None = None) -> Tensor:
        """(B, S, D) -> (B, S, D). `batch` may hold `document_ids` (B, S), at whose starts the convolution is empty."""
        further = () if cache is None else (cache,)
        mixed: Tensor = self.core([h], [self.filters(h.dtype)], batch, *further)
        return h + mixed if self.residual else mixed


class WithCanon(nn.Module):
    """Base of the classes of parts that a Canon layer is before; the other base is the part's own class."""

    canon: CanonLayer

    def forward(self, x: Tensor, batch: Batch, cache: LayerCaches | None = None) -> Tensor:
        """As the part, whose own cache is one entry of `cache`."""
        own: Any = super().forward
        if cache is None:
            return own(self.canon(x, batch), batch)
        further = [cache[PART]] if PART in cache else []
        return own(self.canon(x, batch, cache[CANON]), batch, *further)

    def new_cache(self, batch_size: int, length: int) -> LayerCaches:
        """Returns the caches of both."""
        caches: dict[str, Any] = {CANON: TailCache()}
        if new_cache := getattr(super(), "new_cache", None):
            caches[PART] = new_cache(batch_size, length)
        return LayerCaches(caches)

    def prepare_decode(self, batch: Batch, cache: LayerCaches) -> Batch:
        """Returns the batch with the entries that the part needs, beside its cache."""
        prepare = getattr(super(), "prepare_decode", None)
        return batch if prepare is None else prepare(batch, cache[PART])

    def flops(self, seq_len: int) -> float:
        """Counts 6 a weight of the filters, beside the part."""
        own = getattr(super(), "flops", None)
        if own is None:  # 6 an element of all matrices, of which the filters are one
            return 6.0 * sum(parameter.numel() for parameter in self.parameters() if parameter.ndim > 1)
        return float(own(seq_len)) + 6.0 * self.canon.filters.weight.numel()

    def parameter_roles(self) -> Mapping[str, Role]:
        """Makes the filters a norm: no matrix that an optimizer may turn, and no weight decay."""
        own: Mapping[str, Role] = getattr(super(), "parameter_roles", dict)()
        return {**own, "canon.filters.weight": "norm"}

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        """Every rank computes all features, of whose results it uses a part; the part gathers positions before that.

        A part that gathers none has a plan without the filters, which `tp` then refuses by their name.
        """
        own = dict(getattr(super(), "tensor_parallel_plan", dict)())
        return {**own, "canon.filters": "replicate"} if own.get("") == "whole_input" else own

    def sequence_mixers(self) -> Mapping[str, int]:
        """Adds the convolution, to which each feature is a head."""
        return {**getattr(super(), "sequence_mixers", dict)(), "canon.core": self.canon.dim}


def canonical(part: nn.Module, canon: CanonLayer) -> nn.Module:
    """Put a Canon layer before a part of a block, in place: its class becomes one derived from it. Returns the part."""
    own: Any = type(part)
    part.__class__ = derived(WithCanon, own)
    part.canon = canon
    return part
