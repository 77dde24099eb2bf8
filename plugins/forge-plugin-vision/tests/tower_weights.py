"""Weights of published towers by the tables of forge-plugin-weights, for tests of the encoder alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from forge_plugin_weights.architectures.llama4_vision import tower_rules as llama4_rules
from forge_plugin_weights.architectures.mistral3 import pixtral_rules
from forge_plugin_weights.architectures.vision_towers import tower_rules
from forge_plugin_weights.kinds import Rule


def load_published(tower: nn.Module, state: Mapping[str, Tensor], patch: int) -> None:
    """Give an encoder the weights of a published tower, by their names in `transformers`; it may lack some of them."""
    flat = state["embeddings.patch_embedding.weight"].ndim == 2
    _load(tower, state, tower_rules({"vision.encoder.patch": patch}, "", flat_patches=flat))


def load_pixtral(tower: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give `qwen_vit` the weights of Pixtral's tower, likewise."""
    side = state["patch_conv.weight"].shape[-1]
    rules = pixtral_rules({"vision.encoder.patch": side})
    _load(tower, {f"vision_tower.{name}": tensor for name, tensor in state.items()}, rules)


def load_llama4(tower: nn.Module, state: Mapping[str, Tensor], heads: int) -> None:
    """Give `vit` the weights of Llama 4's tower, likewise."""
    width = state["class_embedding"].shape[0]
    _load(tower, state, llama4_rules({"vision.encoder.dim": width, "vision.encoder.heads": heads}, ""))


def _load(tower: nn.Module, state: Mapping[str, Tensor], rules: Sequence[Rule]) -> None:
    own = {f"vision.encoder.{name}": parameter for name, parameter in tower.named_parameters()}
    shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
    for name, parameter in own.items():
        parts = [part for rule in rules for part in rule.parts(name, shapes)]
        assert parts, name
        with torch.no_grad():
            for part in parts:
                part.of_ours(parameter).copy_(part.of_theirs(state[part.theirs]))
