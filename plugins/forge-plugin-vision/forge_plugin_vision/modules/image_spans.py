"""Images whose positions attend to each other in both directions, for fusion `joint` with `bidirectional`.

Shapes: B sequences, S positions, N images of a row at most, P patches of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from forge_core.contracts.errors import JobError, Problem
from forge_core.contracts.model import Model
from forge_kit.nn.derived_class import derived
from forge_plugin_transformer.modules.spans import SPANS, bound_spans, spans_problem, with_spans
from forge_plugin_vision.kinds import GRIDS, PATCHES, Grid, ImageInput
from forge_plugin_vision.modules.grafting import PLACES
from forge_plugin_vision.modules.vision import feature_count

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch

    Base = Model
else:
    Base = object


@frozen
class ImageSpans:
    """Adds to a batch which of its positions are of one image, on the device alone."""

    image_input: ImageInput
    features: int
    """Features of a row at most."""

    def __call__(self, batch: Batch) -> Batch:
        """Returns the batch, which has `grids` and `PLACES`, with spans: each entry of `grids` is one, videos too.

        A video whose frames have text between is as many spans as runs of positions: see `with_spans`.
        """
        grids, places = batch[GRIDS], batch[PLACES]
        # Sizes are tensors, for which adapters' arithmetic holds, too.
        sizes: Any = self.image_input.positions(Grid(*grids.unbind(-1)))  # type: ignore[arg-type]
        # Of the grids and not of neighbours in `input_ids`: two images may stand side by side.
        image = torch.searchsorted(sizes.cumsum(1), places.clamp(min=0), right=True)
        return with_spans(batch, image.where(places >= 0, -1), self._at_most(batch))

    def _at_most(self, batch: Batch) -> int:
        """Returns the most image positions that a row may have: the budget's number if the batch keeps to it."""
        form, patches, length = self.image_input, batch[PATCHES].shape[1], batch[PLACES].shape[1]
        within = patches <= form.patches_per_sequence and batch[GRIDS].shape[1] <= form.images_per_sequence
        return min(self.features, length) if within else length


class BidirectionalModel(Base):
    """Mixin of a model with fusion `joint`: adds the spans of images to batches."""

    image_spans: ImageSpans

    def prepare_sequences(self, batch: Batch) -> Batch:
        """Adds spans while rows are whole, unless the batch has no images or has spans already."""
        batch = super().prepare_sequences(batch)
        return self.image_spans(batch) if GRIDS in batch and SPANS not in batch else batch

    def sequence_mixers(self) -> Mapping[str, int]:
        """None: a stage that replaces them by causal attention over other ranks' positions would drop the spans."""
        return {}


def add_image_spans(model: Any, *, in_windows: bool) -> None:
    """Has positions of an image attend to each other in a model with fusion `joint`.

    Args:
        model: with the vision part.
        in_windows: whether only layers with a window do, within it.

    Raises:
        JobError: an attention of the language model is causal everywhere.
    """
    if problem := spans_problem(model) or (bound_spans(model) if in_windows else None):
        hint = "take another language model or attention, such as gqa without mtp, or set bidirectional = false"
        raise JobError([Problem("model.fusion.bidirectional", f"{problem}; {hint}")])
    vision = model.vision
    model.image_spans = ImageSpans(vision.image_input, feature_count(vision))
    base: Any = type(model)
    model.__class__ = derived(BidirectionalModel, base)
