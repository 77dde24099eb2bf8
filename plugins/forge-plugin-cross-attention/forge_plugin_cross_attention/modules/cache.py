"""The cache of a model with cross-attention, for generation. Shapes as in `sight`; K key/value heads of width E."""

from __future__ import annotations

from typing import Any

import torch
from attrs import define
from torch import Tensor


@define
class LayerCache:
    """The language model's cache of a layer, and the keys and values of the images so far."""

    language: Any
    keys_and_values: tuple[Tensor, Tensor] | None = None
    """(B, M, K, E) each."""

    def extend(self, new: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new images, if any. Returns the keys and values of all images so far."""
        if new is not None:
            old = self.keys_and_values
            self.keys_and_values = (
                new if old is None else (torch.cat([old[0], new[0]], 1), torch.cat([old[1], new[1]], 1))
            )
        assert self.keys_and_values is not None
        return self.keys_and_values


@define
class ImageCache:
    """Caches of all layers, and where the images so far stand."""

    layers: dict[str, Any]
    ids: Tensor | None = None
    """(B, T), integer ids of the positions so far, from which `visible_images` is recomputed in each call."""
    numbers: Tensor | None = None
    """(B, M), number of the image in its row that each feature belongs to; -1: none."""
    images: Tensor | None = None
    """(B, 1), images of the row so far."""

    def add_positions(self, ids: Tensor) -> Tensor:
        """Append S positions. Returns the ids of all."""
        self.ids = ids if self.ids is None else torch.cat([self.ids, ids], 1)
        return self.ids

    def add_images(self, grids: Tensor, numbers: Tensor) -> None:
        """Append images of these grids (B, N, 3); `numbers` (B, M) begin at 0."""
        new = (grids[..., 0] != 0).sum(1, keepdim=True)  # frames are negative for tiles that are joined
        if self.numbers is None or self.images is None:
            self.numbers, self.images = numbers, new
            return
        later = (numbers + self.images).where(numbers >= 0, -1)  # numbered after the images of earlier calls
        self.numbers, self.images = torch.cat([self.numbers, later], 1), self.images + new
