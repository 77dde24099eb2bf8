"""Which features of images a position sees. Nothing here makes the host wait for the device.

Shapes: B sequences, S positions, N images of a row at most, M features of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.contracts.errors import ForgeError
from forge_plugin_vision.kinds import GRIDS, PATCHES, Grid

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_plugin_vision.kinds import ImageInput

VISIBLE = "images_visible"
"""Batch entry (B, S, 2): numbers in the row of the first image that a position sees, and of the one after the last."""
MASK = "features_visible"
"""Batch entry (B, 1, S, M) bool: whether a position sees a feature; all true for a position that sees none, whose
attention is finite so and multiplied by zero."""
SEEN = "sees_images"
"""Batch entry (B, S, 1), in the compute dtype: 1 for a position that sees an image, else 0. With sequence parallel it
has this rank's positions only."""


def visible_images(ids: Tensor, document_ids: Tensor | None, sees: str) -> Tensor:
    """Returns `VISIBLE` (B, S, 2) for ids (B, S), negative at images; for `sees` see `CrossAttention`."""
    image = ids < 0
    stop = image.cumsum(1)
    # `ids` only give the shape: without `document_ids` a row is one document.
    begins = _begins(ids if document_ids is None else document_ids, document_ids is not None)
    # Images before the position's document: a number that never falls along the row, so the latest is the largest.
    before = _latest(stop - image.long(), begins)
    first = {
        "last": stop - 1,
        "together": _latest(stop - 1, image & (begins | ~F.pad(image, (1, 0))[:, :-1])),
        "all": before,
    }[sees]
    # The latest image of the row may belong to an earlier document; then nothing is between both numbers.
    return torch.stack([torch.maximum(first, before), stop], -1)


def _begins(document_ids: Tensor, several: bool) -> Tensor:
    """Returns (B, S) bool: whether a document begins at a position."""
    first = torch.zeros_like(document_ids, dtype=torch.bool)
    first[:, :1] = True
    return first if not several else first | F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0))


def _latest(numbers: Tensor, where: Tensor) -> Tensor:
    """Returns, for each position of (B, S), the number at the latest position that is true; 0 before the first."""
    # Numbers ascend along a row, so the largest so far is the latest
    return numbers.where(where, 0).cummax(1).values


class Sight(nn.Module):
    """Makes the entries `MASK` and `SEEN`, which all blocks share. It has no parameters.

    Its own `forward` is what tensor parallel divides by positions: a sum over the ranks, of which one has a summand.
    """

    def __init__(self, budget: ImageInput, features: int, dtype: torch.dtype, *, summand: bool = True) -> None:
        """Set it up.

        Args:
            budget: the size of rows of images; its adapter determines how many features an image has.
            features: M of the batches of training.
            dtype: the compute dtype.
            summand: whether this rank has the values, of which the sum over tensor-parallel ranks is made.
        """
        super().__init__()
        self.budget, self.features, self.dtype, self.summand = budget, features, dtype, summand

    def forward(self, sees: Tensor) -> Tensor:
        """Maps (B, S, 1) bool to the compute dtype; zeros on ranks without the summand."""
        return sees.to(self.dtype) * float(self.summand)

    def add_masks(self, batch: Batch, numbers: Tensor | None = None) -> Batch:
        """Returns the batch with `MASK` and `SEEN`; by default, `numbers` is computed from its own images."""
        if numbers is None:
            self.check_size(batch)
            numbers = self.numbers(batch[GRIDS], self.features)
        first, stop = batch[VISIBLE].unsqueeze(-2).unbind(-1)
        numbers = numbers.unsqueeze(1)
        mask = (numbers >= first) & (numbers < stop)
        sees = mask.any(-1, keepdim=True)
        # Who sees nothing sees all: a softmax over nothing is no number, and `SEEN` drops the result
        return {**batch, MASK: (mask | ~sees).unsqueeze(1), SEEN: self(sees)}

    def check_size(self, batch: Batch) -> None:
        """Raise `ForgeError` if a row has another room for images than in training, so that M is unknown."""
        # Masks are made before features, and on ranks of a pipeline that have none: M must be known.
        patches, budget = batch[PATCHES].shape[1], self.budget.patches_per_sequence
        images, most = batch[GRIDS].shape[1], self.budget.images_per_sequence
        if (patches, images) != (budget, most):
            message = f"rows have room for {patches} patches and {images} images; in training they have {budget}"
            raise ForgeError(
                f"{message} and {most}: fill them with zeros, or decode in one piece, which takes any number"
            )

    def numbers(self, grids: Tensor, features: int) -> Tensor:
        """Returns (B, M), the number in the row of each feature's image, -1 for none, for M = `features`."""
        # 0 for images that are not there, whatever the adapter states for an empty grid
        sizes = self.budget.features(Grid(*grids.unbind(-1))) * (grids[..., 0] != 0)  # type: ignore[arg-type]
        # Contiguous, as `searchsorted` would otherwise warn and copy
        index = torch.arange(features, device=grids.device).expand(len(grids), -1).contiguous()
        numbers = torch.searchsorted(sizes.cumsum(1), index, right=True)
        return numbers.where(numbers < grids.shape[1], -1)
