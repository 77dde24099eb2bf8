"""The model `vision_tower`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from forge_core.contracts.model import Model, Role
from forge_plugin_vision.kinds import GRIDS, PATCHES
from forge_plugin_vision.modules.images import Images
from forge_plugin_vision.modules.vision import Normalise

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.data import Batch
    from forge_plugin_vision.kinds import ImageFormat


class TowerModel(Model):
    """An encoder by the names that it has in a vision-language model; it has no layers for tokens, and no head."""

    def __init__(self, encoder: nn.Module, form: ImageFormat, dtype: torch.dtype) -> None:
        """Args: `form` of the encoder's images; `dtype`, the compute dtype."""
        super().__init__()
        self.vision = nn.ModuleDict({"normalise": Normalise(form, dtype), "encoder": encoder})
        self.layers = nn.ModuleDict()

    def features(self, batch: Batch) -> Tensor:
        """Returns the features (B, F, W) of a batch's images."""
        images = Images.of(batch[GRIDS], batch[PATCHES].shape[1])
        features: Tensor = self.vision["encoder"](self.vision["normalise"](batch[PATCHES]), images)[0]
        return features

    def parameter_roles(self) -> Mapping[str, Role]:
        """Returns the encoder's roles, under the names that a vision-language model has for its parameters."""
        roles: Mapping[str, Role] = getattr(self.vision["encoder"], "parameter_roles", dict)()
        return {f"vision.encoder.{name}": role for name, role in roles.items()}
