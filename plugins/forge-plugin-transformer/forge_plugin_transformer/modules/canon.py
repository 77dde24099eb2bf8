"""Canon layers before and within the parts of a block.

Shapes: B sequences, S positions, D model width, W positions of a kernel.

The part of a block keeps its module, with its names and all that stages ask of it: its class is replaced by one that
is derived from it and computes the Canon layer first. So tensor-parallel ranks gather positions once for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

CANON, INNER, PART = "canon", "inner", "part"
"""Names in a cache: of the Canon layer before a part, of those within, and of the part itself if that has a cache."""


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


class InnerCanon(nn.ModuleDict):
    """A Canon layer for each of the tensors between both steps of a part."""

    def __init__(self, widths: Mapping[str, int], kernel: int, *, residual: bool) -> None:
        super().__init__({name: CanonLayer(width, kernel, residual=residual) for name, width in widths.items()})

    def forward(self, projected: Sequence[Tensor], batch: Batch, caches: LayerCaches | None = None) -> Sequence[Tensor]:
        """Tensors (B, S, …), in the order of the names, to as many of the same shapes."""
        return [
            layer(h.flatten(2), batch, None if caches is None else caches[name]).view_as(h)
            for (name, layer), h in zip(self.items(), projected, strict=True)
        ]

    def new_cache(self) -> LayerCaches:
        """Returns a cache for each layer, by name."""
        return LayerCaches({name: TailCache() for name in self})


class WithCanon(nn.Module):
    """Base of the classes of parts with Canon layers; the other base is the part's own class."""

    canon: CanonLayer | None
    """Before the part."""
    inner_canon: InnerCanon | None
    """Between its two steps, see `forge_plugin_transformer.modules.parts.InTwoSteps`."""

    def forward(self, x: Tensor, batch: Batch, cache: LayerCaches | None = None) -> Tensor:
        """As the part, whose own cache is one entry of `cache`."""
        own: Any = super()
        caches: Mapping[str, Any] = {} if cache is None else cache
        if self.canon is not None:
            x = self.canon(x, batch, caches.get(CANON))
        further = [caches[PART]] if PART in caches else []
        if self.inner_canon is None:
            return own.forward(x, batch, *further)
        projected = self.inner_canon(own.project(x, batch), batch, caches.get(INNER))
        return own.finish(projected, x, batch, *further)

    def new_cache(self, batch_size: int, length: int) -> LayerCaches:
        """Returns the caches of all."""
        caches: dict[str, Any] = {} if self.canon is None else {CANON: TailCache()}
        if self.inner_canon is not None:
            caches[INNER] = self.inner_canon.new_cache()
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
        if own is None:  # 6 an element of all matrices, of which the filters are some
            return 6.0 * sum(parameter.numel() for parameter in self.parameters() if parameter.ndim > 1)
        return float(own(seq_len)) + 6.0 * sum(layer.filters.weight.numel() for layer in self._layers().values())

    def parameter_roles(self) -> Mapping[str, Role]:
        """Makes the filters norms: no matrices that an optimizer may turn, and no weight decay."""
        own: Mapping[str, Role] = getattr(super(), "parameter_roles", dict)()
        return {**own, **{f"{name}.filters.weight": "norm" for name in self._layers()}}

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        """Before the part, every rank computes all features, of whose results it uses a part; within, its own ones.

        The part gathers positions before that. A part that gathers none has a plan without the filters, which `tp` then
        refuses by their name.
        """
        own = dict(getattr(super(), "tensor_parallel_plan", dict)())
        if own.get("") != "whole_input":
            return own
        return {**own, **{f"{name}.filters": "replicate" if name == "canon" else "column" for name in self._layers()}}

    def sequence_mixers(self) -> Mapping[str, int]:
        """Adds the convolutions, to which each feature is a head."""
        convolutions = {f"{name}.core": layer.dim for name, layer in self._layers().items()}
        return {**getattr(super(), "sequence_mixers", dict)(), **convolutions}

    def _layers(self) -> Mapping[str, CanonLayer]:
        """Returns the Canon layers by their names in the part."""
        before = {} if self.canon is None else {"canon": self.canon}
        within: Any = {} if self.inner_canon is None else self.inner_canon
        return {**before, **{f"inner_canon.{name}": layer for name, layer in within.items()}}


def canonical(part: nn.Module, canon: CanonLayer | None, inner: InnerCanon | None) -> nn.Module:
    """Give a part of a block Canon layers, in place: its class becomes one derived from it. Returns the part."""
    changed: Any = part
    own: Any = type(part)
    changed.__class__ = derived(WithCanon, own)
    changed.canon, changed.inner_canon = canon, inner
    return part
