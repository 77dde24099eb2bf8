"""The model `vision_tower`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from forge_core.contracts.model import Model, Role


class TowerModel(Model):
    """An encoder by the names that it has in a vision-language model; it has no layers for tokens, and no head."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.vision = nn.ModuleDict({"encoder": encoder})
        self.layers = nn.ModuleDict()

    def parameter_roles(self) -> Mapping[str, Role]:
        roles: Mapping[str, Role] = getattr(self.vision["encoder"], "parameter_roles", dict)()
        return {f"vision.encoder.{name}": role for name, role in roles.items()}
