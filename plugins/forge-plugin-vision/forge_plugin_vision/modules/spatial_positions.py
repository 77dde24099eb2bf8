"""Coordinates of positions on the axes frame, row and column, for a language model that encodes them (`mrope`).

Shapes: B sequences, S positions, N images of a row at most.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, frozen
from torch import Tensor
from torch.nn import functional as F

from forge_core.contracts.errors import ForgeError, JobError, Problem
from forge_core.contracts.model import Model
from forge_kit.nn.derived_class import derived
from forge_plugin_transformer.modules.documents import document_starts
from forge_plugin_vision.kinds import GRIDS, SECONDS, VIDEO, Grid, ImageInput
from forge_plugin_vision.modules.images import Images
from forge_plugin_vision.modules.mrope import POSITIONS

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_plugin_vision.mrope import TimeAxis

    Base = Model
else:
    Base = object


@frozen
class SpatialPositions:
    """Computes the coordinates of a batch of whole rows, on the device alone.

    The coordinates of a token are equal: the position it would have if each image before it in its document had as
    many positions as the image's larger side has features. A feature adds its frame, row and column to the position at
    which its image starts. With `time = "apart"`, each entry of a video's time axis is an image, with its own start.
    """

    merge: int
    """Patches along each side of a feature."""
    time: TimeAxis
    """`MultimodalRope.time`."""
    interval: float
    """Positions of a second of a video, or from one entry of its time axis to the next."""

    def __call__(self, batch: Batch, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute the coordinates.

        Args:
            batch: `input_ids` and `grids`, for `seconds` also `grid_seconds`; `positions` (by default 0, 1, …) and
                `document_ids` if there are any.
            shift: (B, 1) what images before this batch took from positions; None: there were none.

        Returns:
            Coordinates (B, S, 3) int64, and the shift (B, 1) of whatever follows.

        Raises:
            ForgeError: videos are placed by seconds, which the batch does not have.
        """
        grids = torch.cat([batch[GRIDS][..., :1], batch[GRIDS][..., 1:] // self.merge], -1)  # in features
        is_feature = batch["input_ids"] < 0
        feature = is_feature.cumsum(1) - is_feature.long()  # of the row, or the next one where a token stands
        places = Images.of(grids, feature.shape[1]).at(feature)
        frames, rows, columns = grids.unbind(-1)
        area, side = rows * columns, torch.maximum(rows, columns)
        # By how much text moves: an image counts as its larger side, and takes as many positions as features.
        of_frame = (side - area) if self.time == "apart" else torch.zeros_like(area)
        whole = of_frame * frames if self.time == "apart" else (side - area * frames)
        shifts = F.pad(whole.cumsum(1), (1, 0))  # before each image, and behind the last
        # Images before a token are those before the next feature, and so are the frames of a video with text between.
        own = places.number.clamp(max=grids.shape[1] - 1)
        taken = shifts.gather(1, places.number) + (places.frame * of_frame.gather(1, own)).where(places.valid, 0)
        starts = _plain(batch) + _in_document(taken, batch)
        within = places.row * columns.gather(1, own) + places.column
        if self.time != "apart":
            within = within + places.frame * area.gather(1, own)
        offsets = torch.stack([self._time(places.frame, own, batch), places.row, places.column], -1)
        # Zero for tokens: `places` gave each of them the place of the next feature
        offsets = (offsets - within.unsqueeze(-1)) * is_feature.unsqueeze(-1)
        before = 0 if shift is None else shift
        return (starts + before).unsqueeze(-1) + offsets, shifts[:, -1:] + before

    def _time(self, frame: Tensor, image: Tensor, batch: Batch) -> Tensor:
        """Returns (B, S): positions from the start of each feature's image to its frame; both are given (B, S)."""
        if self.time == "apart":
            return torch.zeros_like(frame)
        if self.time == "frames":
            spaced = (frame * self.interval).long()
        elif SECONDS in batch:
            # In float32, as transformers does: whole numbers of positions depend on the rounding.
            spaced = (frame * (batch[SECONDS] * self.interval).gather(1, image)).long()
        else:
            message = f"the batch has videos without `{SECONDS}`"
            raise ForgeError(f'{message}, by which mrope with time = "seconds" places them; give it, or set another')
        return torch.where(batch["input_ids"] == VIDEO, spaced, frame)


def _plain(batch: Batch) -> Tensor:
    """Returns the positions (B, S), or (S,) where the batch has none."""
    ids = batch["input_ids"]
    return batch["positions"] if "positions" in batch else torch.arange(ids.shape[1], device=ids.device)


def _in_document(shifts: Tensor, batch: Batch) -> Tensor:
    """Returns shifts (B, S) by the images of a position's own document, given those by all images before it."""
    if "document_ids" not in batch:
        return shifts
    index = torch.arange(shifts.shape[1], device=shifts.device)
    # Positions restart with each document, so shifts of earlier documents are taken away.
    first = (document_starts(batch["document_ids"]) * index).cummax(1).values
    return shifts - shifts.gather(1, first)


@define
class SpatialCache:
    """A language model's cache, and by how much images have shifted the positions that follow."""

    inner: Any
    shift: Tensor | None = None
    """(B, 1) int64; None: there was no image."""


class SpatialModel(Base):
    """Mixin of a vision-language model: adds the entry `POSITIONS`, and continues behind images in generation."""

    spatial_positions: SpatialPositions

    def prepare_sequences(self, batch: Batch) -> Batch:
        """Adds coordinates while rows are whole: they depend on the images before a position."""
        batch = super().prepare_sequences(batch)
        if POSITIONS in batch or GRIDS not in batch:
            return batch
        return {**batch, POSITIONS: self.spatial_positions(batch)[0]}

    def sequence_entries(self) -> Collection[str] | None:
        """Returns the entries with `POSITIONS`, which has three values for each position; None: unknown."""
        entries = super().sequence_entries()
        return None if entries is None else [*entries, POSITIONS]

    def new_cache(self, batch_size: int, length: int) -> SpatialCache:
        """Returns the language model's cache, with a place for the shift that images cause."""
        return SpatialCache(super().new_cache(batch_size, length))  # type: ignore[misc]

    def decode(self, batch: Batch, cache: SpatialCache) -> Tensor:
        """Adds coordinates of the new positions, shifted by the images of earlier calls."""
        if GRIDS in batch:
            coordinates, cache.shift = self.spatial_positions(batch, cache.shift)
            batch = {**batch, POSITIONS: coordinates}
        elif cache.shift is not None:  # text behind images: equal on all axes
            batch = {**batch, POSITIONS: (batch["positions"] + cache.shift).unsqueeze(-1).expand(-1, -1, 3)}
        decoded: Tensor = super().decode(batch, cache.inner)  # type: ignore[misc]
        return decoded


def add_spatial_positions(model: Any, seen: ImageInput) -> None:
    """Has a vision-language model compute `POSITIONS` if a module of it has that as its `entry`; else changes nothing.

    Raises:
        JobError: features of the adapter are no grid, and so have no coordinates.
    """
    asking = next((module for module in model.modules() if getattr(module, "entry", None) == POSITIONS), None)
    if asking is None:
        return
    adapter, side = seen.adapter, seen.adapter.multiple
    # By example: an adapter declares a count of features, not how they lie.
    if [seen.features(Grid(*size)) for size in ((1, side, side), (2, 2 * side, 3 * side))] != [1, 12]:
        message = f"{type(adapter).__name__} does not make one feature of each {side} x {side} patches, and so"
        hint = "take another adapter, or another position encoding"
        raise JobError([Problem("model.vision.adapter", f"{message} none has a row and a column for mrope; {hint}")])
    model.spatial_positions = SpatialPositions(side, asking.time, asking.interval)
    base: Any = type(model)
    model.__class__ = derived(SpatialModel, base)
