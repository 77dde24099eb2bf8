"""Weights of published towers by the tables of forge-plugin-weights, for tests of the encoder alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from forge_plugin_weights.architectures.vision_towers import tower_rules


def load_published(tower: nn.Module, state: Mapping[str, Tensor], patch: int) -> None:
    """Give an encoder the weights of a published tower, by their names in `transformers`; it may lack some of them."""
    flat = state["embeddings.patch_embedding.weight"].ndim == 2
    rules = tower_rules({"vision.encoder.patch": patch}, "", flat_patches=flat)
    own = {f"vision.encoder.{name}": parameter for name, parameter in tower.named_parameters()}
    shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
    for name, parameter in own.items():
        parts = [part for rule in rules for part in rule.parts(name, shapes)]
        assert parts, name
        with torch.no_grad():
            for part in parts:
                part.of_ours(parameter).copy_(part.of_theirs(state[part.theirs]))
