"""Weights of `vision_language` and of Hugging Face's models, both ways.

Towers: SiglipVisionModel, Siglip2VisionModel and CLIPVisionModel for the encoder `vit`. Whole models:
LlavaForConditionalGeneration (adapter `mlp`), Idefics3ForConditionalGeneration and SmolVLMForConditionalGeneration
(adapter `pixel_shuffle`), with fusion `joint`. Names of the language model are translated by a function of the caller,
such as `forge_plugin_transformer.huggingface_names.from_huggingface`.

The tensors are the same but for the projection of patches: theirs is a convolution or, in SigLIP 2, a matrix whose
inputs are in the order row, column, channel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import isqrt
from typing import Literal

from torch import Tensor

Language = Callable[[str], str]
"""Translates a name of the language model."""
Family = Literal["siglip", "siglip2", "clip", "llava", "idefics3"]
"""Whose names are written; `idefics3` for SmolVLM, too."""

PARTS: Mapping[str, str] = {
    "attention_norm": "layer_norm1",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "ffn_norm": "layer_norm2",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
"""Modules of a block of the tower: our name, theirs."""
ENDS: Mapping[str, str] = {
    "patch": "embeddings.patch_embedding",
    "positions": "embeddings.position_embedding",
    "pre_norm": "pre_layrnorm",
    "norm": "post_layernorm",
}
"""Modules before and after the blocks, as in `PARTS`."""
ADAPTERS: Mapping[str, str] = {
    "up": "multi_modal_projector.linear_1",
    "down": "multi_modal_projector.linear_2",
    "project": "connector.modality_projection.proj",
}
"""Modules of the adapters."""
CLASS_TOKEN = ("class_token", "embeddings.class_embedding")
PATCH = "vision.encoder.patch.weight"

_TOWERS: Mapping[str, str] = {"llava": "model.vision_tower.", "idefics3": "model.vision_model."}
_LANGUAGES: Mapping[str, str] = {"llava": "model.language_model.", "idefics3": "model.text_model."}

# Files have other prefixes than the modules of `transformers` 5, and towers another one inside of a model.
_TOWER = re.compile(
    r"(?:model\.)?(?:vision_tower\.|vision_model\.)*(?P<own>(?:embeddings|encoder|\w+_lay\w+|head)\..+)"
)
_LANGUAGE = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?P<own>.+)")
_ADAPTER = re.compile(rf"(?:model\.)?(?P<module>{'|'.join(map(re.escape, ADAPTERS.values()))})\.(?P<tensor>\w+)")
_THEIR_BLOCK = re.compile(r"encoder\.layers\.(?P<number>\d+)\.(?P<module>.+)\.(?P<tensor>weight|bias)")
_OUR_BLOCK = re.compile(r"blocks\.(?P<number>\d+)\.(?P<module>\w+)\.(?P<tensor>weight|bias)")


def from_huggingface(state: Mapping[str, Tensor], language: Language | None = None) -> dict[str, Tensor]:
    """Returns weights by the names of `vision_language`; those of a tower alone begin with `vision.encoder`.

    The pooling head of SigLIP is left out. An encoder without `norm`, or with a `select_layer` before the last, has
    fewer parameters than the result.

    Args:
        state: tensors by name, as `transformers` has them or as in published files.
        language: translates names like `model.layers.0.mlp.up_proj.weight` and `lm_head.weight` to ours.

    Raises:
        KeyError: there is no counterpart to a tensor.
    """
    names = {name: name_from_huggingface(name, language) for name in state if not _is_pooling(name)}
    return {ours: _our_patch(state[name]) if ours == PATCH else state[name] for name, ours in names.items()}


def to_huggingface(
    state: Mapping[str, Tensor], family: Family, language: Language | None = None, channels: int = 3
) -> dict[str, Tensor]:
    """Returns weights by the names that the model has in `transformers` 5.

    Args:
        state: tensors by the names of `vision_language`.
        family: the model.
        language: translates our names of the language model to ones like `model.layers.0.mlp.up_proj.weight`.
        channels: of an image.

    Raises:
        KeyError: there is no counterpart to a tensor.
    """
    return {
        name_to_huggingface(name, family, language): _their_patch(tensor, family, channels) if name == PATCH else tensor
        for name, tensor in state.items()
    }


def name_from_huggingface(name: str, language: Language | None = None) -> str:
    """`model.vision_tower.encoder.layers.3.mlp.fc1.bias` -> `vision.encoder.blocks.3.up.bias`.

    Args:
        name: of a parameter.
        language: as for `from_huggingface`.

    Raises:
        KeyError: there is no counterpart.
    """
    if match := _ADAPTER.fullmatch(name):
        return f"vision.adapter.{_inverse(ADAPTERS)[match['module']]}.{match['tensor']}"
    if match := _LANGUAGE.fullmatch(name):
        own = match["own"]
        return _translated(own if own.startswith("lm_head.") else f"model.{own}", language)
    if match := _TOWER.fullmatch(name):
        return f"vision.encoder.{_tower_from(match['own'], name)}"
    return _translated(name, language)


def name_to_huggingface(name: str, family: Family, language: Language | None = None) -> str:
    """`vision.encoder.blocks.3.up.bias` -> `model.vision_tower.encoder.layers.3.mlp.fc1.bias`, for `llava`.

    Args:
        name: of a parameter.
        family: the model.
        language: as for `to_huggingface`.

    Raises:
        KeyError: there is no counterpart.
    """
    part, _, own = name.removeprefix("vision.").partition(".")
    if not name.startswith("vision."):
        return _translated(name, language).replace("model.", _LANGUAGES.get(family, "model."), 1)
    if part == "adapter":
        module, _, tensor = own.rpartition(".")
        return f"model.{_known(ADAPTERS, module, name)}.{tensor}"
    return _TOWERS.get(family, "") + _tower_to(own, name)


def _tower_from(own: str, name: str) -> str:
    if own == CLASS_TOKEN[1]:
        return CLASS_TOKEN[0]
    if match := _THEIR_BLOCK.fullmatch(own):
        return f"blocks.{match['number']}.{_known(_inverse(PARTS), match['module'], name)}.{match['tensor']}"
    module, _, tensor = own.rpartition(".")
    return f"{_known(_inverse(ENDS), module, name)}.{tensor}"


def _tower_to(own: str, name: str) -> str:
    if own == CLASS_TOKEN[0]:
        return CLASS_TOKEN[1]
    if match := _OUR_BLOCK.fullmatch(own):
        return f"encoder.layers.{match['number']}.{_known(PARTS, match['module'], name)}.{match['tensor']}"
    module, _, tensor = own.rpartition(".")
    return f"{_known(ENDS, module, name)}.{tensor}"


def _is_pooling(name: str) -> bool:
    match = _TOWER.fullmatch(name)
    return match is not None and match["own"].startswith("head.")


def _our_patch(weight: Tensor) -> Tensor:
    """(W, V) with values in the order channel, row, column; see `forge_plugin_vision.kinds`."""
    if weight.ndim > 2:  # a convolution's (W, channels, rows, columns)
        return weight.flatten(1)
    side = isqrt(weight.shape[1] // 3)
    return weight.unflatten(1, (side, side, -1)).permute(0, 3, 1, 2).flatten(1)


def _their_patch(weight: Tensor, family: Family, channels: int) -> Tensor:
    side = isqrt(weight.shape[1] // channels)
    own = weight.unflatten(1, (channels, side, side))
    return own.permute(0, 2, 3, 1).flatten(1) if family == "siglip2" else own


def _translated(name: str, language: Language | None) -> str:
    if language is None:
        raise KeyError(f"no counterpart for parameter {name!r} without the function `language`")
    return language(name)


def _known(table: Mapping[str, str], module: str, name: str) -> str:
    if module not in table:
        raise KeyError(f"no counterpart for parameter {name!r}")
    return table[module]


def _inverse(table: Mapping[str, str]) -> dict[str, str]:
    return {theirs: ours for ours, theirs in table.items()}
