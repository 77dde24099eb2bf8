"""Weights of a `transformer` with `moe` and of Hugging Face's models with experts, both ways.

From Mixtral, Qwen2-MoE, Qwen3-MoE and DeepSeek-V3; to the last three, whose names are alike. Files have a tensor for
each matrix of each expert, a slice of our stacks; `transformers` 5 holds `gate_up_proj`, two of our stacks in one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from forge_plugin_transformer import huggingface_names

MATRICES: Mapping[str, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
"""Matrices of an expert: our name, theirs."""
MIXTRAL: Mapping[str, str] = {"w1": "gate", "w3": "up", "w2": "down"}
SharedNames = Literal["shared_experts", "shared_expert"]
"""Name of the shared experts: in DeepSeek-V3, and in Qwen2-MoE."""

_OURS = re.compile(r"(?P<layers>layers|mtp\.blocks)\.(?P<number>\d+)\.ffn\.(?P<key>.+)")
_THEIRS = re.compile(r"(?:model\.)?layers\.(?P<number>\d+)\.(?:mlp|block_sparse_moe)\.(?P<key>.+)")
_EXPERT = re.compile(r"experts\.(?P<number>\d+)\.(?P<matrix>\w+)\.weight")


def from_huggingface(
    state: Mapping[str, Tensor], parts: Mapping[str, str] = huggingface_names.PARTS, layers: int | None = None
) -> dict[str, Tensor]:
    """Returns a state of Hugging Face's models by the names of Forge, with experts stacked.

    Args:
        state: tensors by name.
        parts: names of the other modules of a layer, as `forge_plugin_transformer.huggingface_names` takes them.
        layers: number of layers, for multi-token prediction.

    Raises:
        KeyError: there is no counterpart to a tensor.
        ValueError: a layer lacks an expert.
    """
    renamed: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    others = {theirs: ours for name in get_args(SharedNames) for ours, theirs in _others(name).items()}
    matrices = {**{theirs: ours for ours, theirs in MATRICES.items()}, **MIXTRAL}
    for name, tensor in state.items():
        match = _THEIRS.fullmatch(name)
        key = match["key"] if match else ""
        layer = _layer(int(match["number"]), layers) if match else ""
        if key == "experts.gate_up_proj":
            # Stacked along the outputs, the gate first
            renamed[f"{layer}.experts.gate.weight"], renamed[f"{layer}.experts.up.weight"] = tensor.chunk(2, dim=1)
        elif key == "experts.down_proj":
            renamed[f"{layer}.experts.down.weight"] = tensor
        elif (expert := _EXPERT.fullmatch(key)) and expert["matrix"] in matrices:
            experts[f"{layer}.experts.{matrices[expert['matrix']]}.weight"][int(expert["number"])] = tensor
        elif key in others:
            renamed[f"{layer}.{others[key]}"] = tensor
        else:
            renamed[huggingface_names.from_huggingface(name, parts, layers)] = tensor
    return renamed | {name: _stacked(name, own) for name, own in experts.items()}


def to_huggingface(
    state: Mapping[str, Tensor],
    parts: Mapping[str, str] = huggingface_names.PARTS,
    layers: int | None = None,
    shared: SharedNames = "shared_experts",
) -> dict[str, Tensor]:
    """Returns a state by the names of Qwen3-MoE, Qwen2-MoE and DeepSeek-V3, with a tensor per matrix of an expert.

    Args:
        state: tensors by name.
        parts: as for `from_huggingface`.
        layers: as for `from_huggingface`.
        shared: name of the shared experts.

    Raises:
        KeyError: there is no counterpart to a tensor.
    """
    return dict(_to_huggingface(state, parts, layers, shared))


def _to_huggingface(
    state: Mapping[str, Tensor], parts: Mapping[str, str], layers: int | None, shared: SharedNames
) -> Iterator[tuple[str, Tensor]]:
    others = _others(shared)
    stacks = {f"experts.{ours}.weight": theirs for ours, theirs in MATRICES.items()}
    for name, tensor in state.items():
        match = _OURS.fullmatch(name)
        key = match["key"] if match else ""
        if match and key in stacks | others:
            # Modules of multi-token prediction have the numbers after the last layer
            after = 0 if match["layers"] == "layers" else _known(layers, name)
            layer = f"model.layers.{int(match['number']) + after}.mlp"
        if key in stacks:
            for number, own in enumerate(tensor.unbind()):
                yield f"{layer}.experts.{number}.{stacks[key]}.weight", own
        elif key in others:
            yield f"{layer}.{others[key]}", tensor
        else:
            yield huggingface_names.to_huggingface(name, parts, layers), tensor


def _others(shared: SharedNames) -> dict[str, str]:
    """Returns the names of parameters outside the routed experts: ours, and theirs."""
    matrices = {f"shared.{ours}.weight": f"{shared}.{theirs}.weight" for ours, theirs in MATRICES.items()}
    return {
        "router.weight": "gate.weight",
        "router.bias": "gate.e_score_correction_bias",
        "shared_gate.weight": "shared_expert_gate.weight",
        **matrices,
    }


def _layer(number: int, layers: int | None) -> str:
    """Returns our name of the feed-forward part of a layer, or of a multi-token prediction block."""
    return f"layers.{number}.ffn" if layers is None or number < layers else f"mtp.blocks.{number - layers}.ffn"


def _known(layers: int | None, name: str) -> int:
    if layers is None:
        raise KeyError(f"no counterpart for parameter {name!r} without the number of layers, which it comes after")
    return layers


def _stacked(name: str, experts: Mapping[int, Tensor]) -> Tensor:
    missing = sorted(set(range(max(experts) + 1)) - experts.keys())
    if missing:
        raise ValueError(
            f"{name}: of {max(experts) + 1} experts, {len(missing)} are missing, the first is {missing[0]}"
        )
    return torch.stack([experts[number] for number in range(len(experts))])
