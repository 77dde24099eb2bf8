"""Fusion `joint`: features of images take the places of token embeddings.

Shapes: B sequences, S positions, M features of a row, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from forge_kit.nn.taps import TapPoint
from forge_plugin_vision.kinds import GRIDS, PATCHES
from forge_plugin_vision.modules.grafting import PLACES, VisionLanguageModel
from forge_plugin_vision.modules.vision import SharedVision

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Carry


class PlacedVision(SharedVision):
    """Maps a batch to its features at their positions (B, S, D), with zeros where there is a token."""

    def forward(self, batch: Batch) -> Tensor:
        """Returns (B, S, D); with tensor parallel a summand, in which the rows of other ranks are zeros."""
        self.count(batch)
        own = self.own_rows(batch, PATCHES, GRIDS, PLACES)
        return self.among_all(place(self.features(own)[0], own[PLACES]), len(batch[PLACES]))


def place(features: Tensor, places: Tensor) -> Tensor:
    """Returns (B, S, D): features (B, M, D) at the positions that `places` (B, S) numbers, zeros where it is -1."""
    # Shapes depend on S alone. Selecting positions by a mask would make the host wait for their number.
    index = places.clamp(min=0).unsqueeze(-1).expand(-1, -1, features.shape[-1])
    return features.gather(1, index) * (places >= 0).unsqueeze(-1).to(features.dtype)


class JointModel(VisionLanguageModel):
    """See `forge_plugin_vision.Joint`; for inputs of layers there is `JointInputsModel`."""

    def embed(self, batch: Batch) -> Carry:
        """Returns the carry with features added to the embeddings, which are zeros at their positions."""
        x, *rest = super().embed(batch)
        # The tower runs wherever a batch has the entry, whether or not there are images in it: ranks that share
        # parameters gather them together.
        if PATCHES in batch:
            x = x + self.vision(batch)
        return (x, *rest)

    def tap_points(self) -> Mapping[str, TapPoint]:
        """Returns the points of the parts, and the features at their positions, with zeros where there is a token."""
        return {**super().tap_points(), "vision.out": TapPoint("vision")}

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        """Returns the plan with a sum over ranks of the placed features, each of which one rank has computed."""
        plan = super().tensor_parallel_plan()
        return {**plan, "vision": "partial_output"} if plan else plan


class JointInputsModel(JointModel):
    """Of a language model whose layers have inputs made of the embeddings (Gemma 4 E2B), images included."""

    def embed(self, batch: Batch) -> Carry:
        """Returns the language model's carry, to whose embeddings `embedded` has added the features."""
        carry: Carry = super(JointModel, self).embed(batch)
        return carry

    def embedded(self, batch: Batch) -> Tensor:
        """Returns (B, S, D): tokens' embeddings, and features at the positions of images."""
        x: Tensor = super().embedded(batch)  # type: ignore[misc]
        return x + self.vision(batch) if PATCHES in batch else x
