"""DeepStack (Meng et al. 2024, as in Qwen3-VL): further features of images, added after the first language layers.

Between layers, the carry is the language model's own and then K tensors (B, S, D): features of K blocks of the encoder
at their positions, zeros where there is a token. The first of them is the next to be added.

Shapes: B sequences, S positions, M features of a row, D width of the language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_core.contracts.errors import JobError, Problem
from forge_kit.nn.derived_class import derived
from forge_plugin_vision.kinds import PATCHES, Grid
from forge_plugin_vision.modules.joint import JointModel, PlacedVision
from forge_plugin_vision.modules.vision import flops_of

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Carry


class StackedVision(PlacedVision):
    """Maps a batch to (B, S, (1 + K) D): features of the encoder, then of its K taps, at their positions."""

    deepstack: nn.ModuleList
    """Adapters of the taps."""

    def features(self, batch: Batch) -> Sequence[Tensor]:
        """Returns one tensor, (B, M, (1 + K) D)."""
        # As one tensor, so that ranks of tensor parallel sum all of them at once.
        images, encoded = self.encode(batch)
        adapters = (self.adapter, *self.deepstack)
        return (torch.cat([adapter(x, images) for adapter, x in zip(adapters, encoded, strict=True)], -1),)

    def adapter_flops(self, grid: Grid) -> float:
        """Returns the FLOPs of the adapter and the K adapters of taps together."""
        return super().adapter_flops(grid) + sum(flops_of(adapter, grid) for adapter in self.deepstack)


class DeepStackModel(JointModel):
    """Mixin of a language model whose `vision` is a `StackedVision` with K taps."""

    taps: int

    def embed(self, batch: Batch) -> Carry:
        """Returns the language model's carry followed by K tensors (B, S, D), zeros in a batch without images."""
        x, *rest = super(JointModel, self).embed(batch)  # of tokens alone, since `vision` returns 1 + K tensors in one
        if PATCHES not in batch:
            # As many tensors as with images: layers and pipelines expect a carry of one structure.
            return (x, *rest, *(torch.zeros_like(x) for _ in range(self.taps)))
        first, *further = self.vision(batch).chunk(1 + self.taps, -1)
        return (x + first, *rest, *further)

    def finish(self, carry: Carry, batch: Batch) -> Tensor:
        """Drops the K tensors, all of which have been added by now."""
        return super().finish(carry[: -self.taps], batch)


class PassingLayer(nn.Module):
    """Mixin of a language model's layer, which passes the features on."""

    taps: int

    def forward(self, carry: Carry, batch: Batch, *cache: Any) -> Carry:
        """Runs the layer on its own carry, and returns the K tensors as they came."""
        own, further = carry[: -self.taps], carry[-self.taps :]
        # As views: a pipeline detaches what it sends in place, unless it is one.
        return (*super().forward(own, batch, *cache), *(tensor.view_as(tensor) for tensor in further))


class AddingLayer(nn.Module):
    """Mixin of a language model's layer, which adds the first of the features to its output."""

    taps: int

    def forward(self, carry: Carry, batch: Batch, *cache: Any) -> Carry:
        """Runs the layer, adds the first of the K tensors to its output, and moves that tensor to the end."""
        own, (first, *later) = carry[: -self.taps], carry[-self.taps :]
        x, *rest = super().forward(own, batch, *cache)
        # In turn, not by a number of the layer: all of them share one compiled graph.
        return (x + first, *rest, *(tensor.view_as(tensor) for tensor in (*later, first)))


def add_deepstack(model: Any, adapters: Sequence[nn.Module]) -> None:
    """Adds adapters of the encoder's taps to a model that is a `DeepStackModel`, and what its layers do with them.

    Raises:
        JobError: there are fewer language layers than taps, or fewer blocks of the encoder than their numbers.
    """
    vision: StackedVision = model.vision
    blocks = len(getattr(vision.encoder, "blocks", ()))
    taps = vision.image_input.fusion.taps
    for seen, allowed, where in ((len(taps), len(model.layers), "language layers"), (taps[-1] + 1, blocks, "blocks")):
        if seen > allowed:
            message = f"{list(taps)} needs {seen} {where}, of which there are {allowed}; change one of them"
            raise JobError([Problem("model.fusion.deepstack", message)])
    model.taps, vision.deepstack = len(adapters), nn.ModuleList(adapters)
    for number, layer in enumerate(model.layers.values()):
        base: Any = type(layer)
        layer.__class__ = derived(AddingLayer if number < len(adapters) else PassingLayer, base)
        layer.taps = len(adapters)
