"""A language model some of whose layers look at images.

The features of images go from layer to layer behind the language model's own carry, so that a pipeline sends them along
with it.

Shapes: B sequences, S positions, M features of a row, D model width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F

from forge_kit.nn.derived_class import derived
from forge_kit.nn.modules import Embedding
from forge_kit.nn.taps import TapPoint, tap_points
from forge_plugin_cross_attention.modules.block import CrossAttentionBlock
from forge_plugin_cross_attention.modules.cache import ImageCache, LayerCache
from forge_plugin_cross_attention.modules.sight import MASK, VISIBLE, Sight, visible_images
from forge_plugin_transformer.modules import parts
from forge_plugin_vision.kinds import GRIDS, IMAGE, PATCHES, VIDEO
from forge_plugin_vision.modules.cost import LayerCost
from forge_plugin_vision.modules.grafting import VisionLanguageModel
from forge_plugin_vision.modules.vision import SharedVision, feature_count

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Carry, Role
    from forge_plugin_cross_attention.cross_attention import CrossAttention

    Layer = nn.Module
else:
    Layer = object

FEATURES = "features"
"""Batch entry (B, M, D), only while decoding: features that were made before the carry."""
BLOCK = "cross_attention"
"""Name of the block in its layer."""
KINDS = len((IMAGE, VIDEO))


class Markers(nn.Module):
    """Learned embeddings of positions where an image stands: (B, S, D), zeros where there is a token.

    Its output is a sum over the tensor-parallel ranks, of which one has a summand.
    """

    def __init__(self, rows: int, dim: int, dtype: torch.dtype, *, summand: bool) -> None:
        super().__init__()
        self.table = Embedding(rows, dim, dtype=dtype)
        self.summand = summand

    def forward(self, ids: Tensor) -> Tensor:
        """Maps ids (B, S): row 0 for an image, row 1 for all others below 0; zeros on ranks without the summand."""
        rows = self.table((-1 - ids).clamp(0, KINDS - 1))
        return rows * ((ids < 0).unsqueeze(-1) * float(self.summand)).to(rows.dtype)


class SummedVision(SharedVision):
    """Features (B, M, D) as a sum over ranks of tensor parallel, whose number M is rounded up to divide by."""

    def forward(self, batch: Batch) -> Tensor:
        """Returns this rank's summand, in which the rows that other ranks encode are zeros."""
        self.count(batch)
        own, *_ = self.features(self.own_rows(batch, PATCHES, GRIDS))
        # The sum over ranks leaves each with a part of dimension 1, which the number of ranks must divide.
        features = F.pad(own, (0, 0, 0, -own.shape[1] % self.share[1]))
        return self.among_all(features, len(batch[GRIDS]))


class Whole(nn.Module):
    """Features as they are; tensor parallel, which divides the sum over its ranks, makes them whole again here."""

    def forward(self, features: Tensor) -> Tensor:
        return features


class PassesFeatures(Layer):
    """Mixin of a layer: hands on what comes behind its own carry."""

    def forward(self, carry: Carry, batch: Batch, *cache: Any) -> Carry:
        """Runs the layer on the language model's carry, and puts the features behind its result."""
        own, features = divided(carry, batch)
        # A view: a pipeline would detach the very tensor that another layer of this rank has still to use.
        return (*super().forward(own, batch, *cache), *(tensor.view_as(tensor) for tensor in features))


def divided(carry: Carry, batch: Batch) -> tuple[Carry, Carry]:
    """Returns the language model's own carry, and the features in it: one tensor, or none if there are no images."""
    return (carry[:-1], carry[-1:]) if PATCHES in batch else (carry, ())


class LooksBefore(PassesFeatures):
    """Mixin of a layer: a block of cross-attention comes first."""

    cross_attention: CrossAttentionBlock

    def forward(self, carry: Carry, batch: Batch, *cache: Any) -> Carry:
        """Applies the block, then the layer; a `LayerCache` has a cache for each."""
        return super().forward(self.look(carry, batch, *cache), batch, *(own.language for own in cache))

    def prepare_decode(self, batch: Batch, cache: LayerCache) -> Batch:
        """Returns the batch with the entries that the layer needs, beside its own cache."""
        prepared: Batch = super().prepare_decode(batch, cache.language)  # type: ignore[misc]
        return prepared

    def look(self, carry: Carry, batch: Batch, cache: LayerCache | None = None) -> Carry:
        """Applies the block, unless there has been no image."""
        if MASK not in batch:
            return carry
        # While decoding, a batch may have masks and no features: its images came in an earlier call.
        (x, *rest), features = divided(carry, batch)
        return (self.cross_attention(x, features[0] if features else None, batch, cache), *rest, *features)

    def tap_points(self) -> Mapping[str, TapPoint]:
        """Returns the layer's points, and the block's points under names that begin with `cross.`."""
        own: Mapping[str, TapPoint] = getattr(super(), "tap_points", dict)()
        return {**own, **tap_points(self.cross_attention, BLOCK, "cross")}


class LooksAfter(LooksBefore):
    """Mixin of a layer: a block of cross-attention comes last."""

    def forward(self, carry: Carry, batch: Batch, *cache: Any) -> Carry:
        """Applies the layer, then the block, whose input is the layer's output."""
        own = PassesFeatures.forward(self, carry, batch, *(own.language for own in cache))
        return self.look(own, batch, *cache)


class CrossAttentionModel(VisionLanguageModel):
    """Mixin of a language model; see `forge_plugin_cross_attention.CrossAttention`."""

    vision: SummedVision
    whole: Whole
    sight: Sight
    sees: str
    markers: Markers

    def prepare_sequences(self, batch: Batch) -> Batch:
        """Adds `VISIBLE` while rows are whole: afterwards, no rank has the images before its part."""
        batch = super().prepare_sequences(batch)
        if VISIBLE in batch:
            return batch
        return {**batch, VISIBLE: visible_images(batch["input_ids"], batch.get("document_ids"), self.sees)}

    def sequence_entries(self) -> Collection[str] | None:
        """Returns the entries with `VISIBLE`, which has a value for each position; None: unknown."""
        entries = super().sequence_entries()
        return None if entries is None else [*entries, VISIBLE]

    def prepare(self, batch: Batch) -> Batch:
        """Adds the masks that all blocks share, in a batch with images, then what the parts of blocks need."""
        batch = super().prepare(batch)
        if PATCHES in batch and MASK not in batch:
            batch = self.sight.add_masks(batch)
        for _, part in self.cross_attention_parts():
            batch = parts.prepare(part, batch)
        return batch

    def embed(self, batch: Batch) -> Carry:
        """Returns the carry with the markers added to x; in a batch with images, its last tensor is the features."""
        x, *rest = super().embed(batch)
        x = x + self.markers(batch["input_ids"])
        if PATCHES not in batch:
            return (x, *rest)
        # `decode` has made them already, to count them for its cache.
        return (x, *rest, batch[FEATURES] if FEATURES in batch else self.whole(self.vision(batch)))

    def finish(self, carry: Carry, batch: Batch) -> Tensor:
        """Drops the features before the language model's norm."""
        own, _ = divided(carry, batch)
        return super().finish(own, batch)

    # --- queries of the engine and the stages --------------------------------------------------------------------

    def cross_attention_parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the parts of each block with their names, in order."""
        for number, layer in self.layers.items():
            if (block := getattr(layer, BLOCK, None)) is not None:
                for name in CrossAttentionBlock.PARTS:
                    yield f"layers.{number}.{BLOCK}.{name}", getattr(block, name)

    def flops(self, seq_len: int) -> float | None:
        """Returns the FLOPs with all blocks, for rows of M features; None: the language model's are unknown."""
        own = super().flops(seq_len)
        return None if own is None else own + sum(self._block_flops(layer, seq_len) for layer in self.layers.values())

    def layer_flops(self, seq_len: int) -> Sequence[float] | None:
        """Returns the FLOPs of each layer with its block, for rows of M features; None: unknown."""
        own = super().layer_flops(seq_len)
        if own is None:
            return None
        return [
            flops + self._block_flops(layer, seq_len) for flops, layer in zip(own, self.layers.values(), strict=True)
        ]

    def layer_costs(self, seq_len: int) -> Sequence[LayerCost] | None:
        """Returns the costs with each block's in its layer, or all in the one cost of a whole language model."""
        costs = super().layer_costs(seq_len)
        if costs is None:
            return None
        every = list(costs)
        for number, layer in enumerate(self.layers.values()):
            if (block := getattr(layer, BLOCK, None)) is not None:
                place = number if len(every) > 1 else 0  # of a language model without `layer_flops` there is one
                own = block.attention.cost()
                # The feed-forward part is applied to all tokens, whether or not they see an image.
                own = own._replace(weights=own.weights + parts.flops(block.ffn, seq_len))
                every[place] = LayerCost(*(sum(pair) for pair in zip(every[place], own, strict=True)))
        return every

    def _block_flops(self, layer: nn.Module, seq_len: int) -> float:
        block: CrossAttentionBlock | None = getattr(layer, BLOCK, None)
        if block is None:
            return 0.0
        return block.attention.flops(seq_len, self.sight.features) + parts.flops(block.ffn, seq_len)

    def ends(self) -> tuple[Sequence[str], Sequence[str]] | None:
        """Returns the ends with `markers` in the first, next to `vision`; None: unknown."""
        ends = super().ends()
        return None if ends is None else ([*ends[0], "markers"], ends[1])

    def parameter_roles(self) -> Mapping[str, Role]:
        """Returns the roles with the markers as an embedding, and the roles that parts of blocks declare."""
        roles = {**super().parameter_roles(), "markers.table.weight": "embedding"}
        for name, part in self.cross_attention_parts():
            roles |= parts.roles(name, part)
        return roles

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        """Returns sums over ranks for vision, markers and sight, and the plans of the parts of blocks."""
        language = super().tensor_parallel_plan()
        if not language:
            return language
        sums = dict.fromkeys(("vision", "markers", "sight"), "partial_output")
        # One rank alone has the markers' values, so gradients of their table are parts of a sum, too.
        plan: dict[str, Any] = {**sums, "markers.table": "partial", "whole": "whole_input"}
        for name, part in self.cross_attention_parts():
            plan |= parts.tensor_parallel_plan(name, part)
            if name.endswith(("norm", "gate")):  # they see this rank's positions only
                plan[name] = "sequence"
        return {**plan, **language}  # first, as globs of the language model may match these names

    def expert_stacks(self) -> Sequence[str]:
        """Returns the stacks of the language model, then the stacks in feed-forward parts of blocks."""
        own = (parts.expert_stacks(name, part) for name, part in self.cross_attention_parts())
        return [*super().expert_stacks(), *chain.from_iterable(own)]

    def float8_exempt(self) -> Sequence[str]:
        """Returns the exemptions of the language model, then the exemptions of parts of blocks."""
        own = (parts.float8_exempt(name, part) for name, part in self.cross_attention_parts())
        return [*super().float8_exempt(), *chain.from_iterable(own)]


class GeneratingModel(CrossAttentionModel):
    """The same for a language model that generates."""

    def new_cache(self, batch_size: int, length: int) -> ImageCache:
        """Returns the language model's caches, joined by keys and values of images in layers that have a block."""
        layers = dict(super().new_cache(batch_size, length))  # type: ignore[misc]
        for number, layer in self.layers.items():
            if getattr(layer, BLOCK, None) is not None:
                layers[number] = LayerCache(layers[number])
        return ImageCache(layers)

    def decode(self, batch: Batch, cache: ImageCache) -> Tensor:
        """Images of a call follow the images of earlier calls; a call without `patches` has no new images."""
        ids = cache.add_positions(batch["input_ids"])
        # From all positions so far, since the last image may be of an earlier call; rows with a cache are one document.
        visible = visible_images(ids, None, self.sees)[:, -batch["input_ids"].shape[1] :]
        batch = {**batch, VISIBLE: visible}
        if PATCHES in batch:
            if isinstance(self.vision, SummedVision):
                batch = {**batch, FEATURES: self.whole(self.vision(batch))}
                count = batch[FEATURES].shape[1]
            else:  # a later rank of a pipeline: features come with the carry, and must be as many as in training
                self.sight.check_size(batch)
                count = self.sight.features
            cache.add_images(batch[GRIDS], self.sight.numbers(batch[GRIDS], count))
        if cache.numbers is not None:
            batch = self.sight.add_masks(batch, cache.numbers)
        return super().decode(batch, cache.layers)


def add_blocks(model: Any, blocks: Mapping[str, nn.Module], keys: CrossAttention, context: BuildContext) -> None:
    """Adds blocks by layer name to a language model of class `CrossAttentionModel`, and all that they share."""
    rank, ranks = 0, context.layout.tp
    if ranks > 1 and context.mesh is not None:
        rank = context.mesh["tp"].get_local_rank()
    vision, dim = model.vision, model.embedding.weight.shape[1]
    vision.__class__, vision.share, model.whole = SummedVision, (rank, ranks), Whole()
    features = feature_count(vision)
    features += -features % ranks  # as `SummedVision` pads them
    model.sees = keys.sees
    model.sight = Sight(vision.image_input, features, context.dtype, summand=rank == 0)
    model.markers = Markers(keys.markers, dim, context.dtype, summand=rank == 0)
    looks = LooksBefore if keys.place == "before" else LooksAfter
    for name, layer in model.layers.items():
        own: Any = type(layer)
        # Every layer, as one without a block could not handle the features in its carry
        layer.__class__ = derived(looks if name in blocks else PassesFeatures, own)
        if name in blocks:
            setattr(layer, BLOCK, blocks[name])
