"""Parameters of a model and of its base: which sizes have grown, and which factors their values absorb."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen
from torch import nn

from forge_core import JobError, Problem
from forge_core.contracts.errors import listed
from forge_core.contracts.model import Model
from forge_core.contracts.optimizer import NamedParameters
from forge_plugin_mup.mup import LAYERS


@frozen(order=True)
class Place:
    """Sizes of a parameter here and in the base; parameters of equal places have equal factors."""

    role: str
    outputs: int
    inputs: int
    """1 of a vector or an embedding: the sum over one row has one summand."""
    base_outputs: int
    base_inputs: int
    absorbed: float = 1.0
    """Factor on what the parameter computes, which its values take instead of the forward pass."""
    in_block: bool = False
    """Whether it belongs to a residual block."""

    @property
    def input_ratio(self) -> float:
        """By how much it has more inputs than in the base."""
        return self.inputs / self.base_inputs

    @property
    def output_ratio(self) -> float:
        """By how much it has more outputs than in the base."""
        return self.outputs / self.base_outputs


@frozen(kw_only=True)
class Comparison:
    """A model and its base."""

    places: Mapping[str, Place]
    """By parameter, of the whole model."""
    depth: float
    """Layers, relative to the base."""
    twins: Mapping[str, tuple[nn.Module, str]] = field(repr=False)
    """By parameter, the module of the base whose initial values it is drawn from, and the key there."""


def compare(model: Model, base: Model) -> Comparison:
    """Compare a whole model with its base, both on the meta device.

    Raises:
        JobError: the base lacks a parameter, or has one of another kind, or logits cannot have their factor.
    """
    parameters = {item.name: item for item in NamedParameters.of(base)}
    names, problems = _base_names(model, parameters), []
    twins: dict[str, tuple[nn.Module, str]] = {}
    places: dict[str, Place] = {}
    for item in NamedParameters.of(model):
        twin = parameters[names[item.name]]
        if twin.role != item.role or twin.parameter.ndim != item.parameter.ndim:
            problems.append(Problem("", f"{item.name} is another kind of parameter in the base"))
            continue
        holder, _, key = twin.name.rpartition(".")
        twins[item.name] = base.get_submodule(holder) if holder else base, key
        sizes = *sizes_of(item.role, item.parameter.shape), *sizes_of(item.role, twin.parameter.shape)
        places[item.name] = Place(item.role, *sizes, in_block=item.name.startswith(f"{LAYERS}."))
    if problems:
        raise JobError(problems)
    # A rank of a pipeline may hold a tied parameter by its other name alone
    places |= {other: places[name] for other, name in model.tied_parameters().items() if name in places}
    return Comparison(places=places, depth=len(model.layers) / len(base.layers), twins=twins)


def sizes_of(role: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns outputs and inputs of a parameter, as `Place` has them."""
    # The vocabulary of an embedding is no sum: a position looks one row up. A stack's first dimension counts matrices
    if role == "embedding" or len(shape) < 2 or role == "bias":
        return shape[-1] if shape else 1, 1
    return shape[-2], shape[-1]


def _base_names(model: Model, base: Mapping[str, Any]) -> dict[str, str]:
    """The name of each parameter's counterpart. A layer that the base has not is compared with one of the same kind.

    Raises:
        JobError: there is no counterpart.
    """
    ours, theirs = _by_layer(name for name, _ in model.named_parameters()), _by_layer(base)
    names: dict[str, str] = {}
    missing: list[str] = []
    for layer, rest in ours.items():
        alike = [number for number, parts in theirs.items() if parts == rest and bool(number) == bool(layer)]
        if layer not in alike and len({_shapes(base, number, rest) for number in alike}) > 1:
            message = f"has layers of several kinds like {LAYERS}.{layer}, and none of this number"
            raise JobError([Problem("", f"{message}; give the base as many layers")])
        if not alike:
            missing += [_joined(layer, part) for part in rest if part not in theirs.get(layer, ())] or [layer]
            continue
        # The layer of the same number, or the one where a repeated pattern of layers would have it
        wanted = layer if layer in alike else alike[int(layer) % len(alike)]
        names |= {_joined(layer, part): _joined(wanted, part) for part in rest}
    if missing:
        message = f"lacks {listed(missing)}; it may be narrower and have fewer layers, and nothing else"
        raise JobError([Problem("", message)])
    return names


def _by_layer(names: Any) -> dict[str, list[str]]:
    """Names below each layer by its number; those outside of layers are below an empty one."""
    found: dict[str, list[str]] = {"": []}
    for name in names:
        first, _, below = name.partition(".")
        layer, _, part = below.partition(".")
        if first == LAYERS:
            found.setdefault(layer, []).append(part)
        else:
            found[""].append(name)
    return found


def _shapes(base: Mapping[str, Any], layer: str, names: list[str]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(base[_joined(layer, name)].parameter.shape) for name in names)


def _joined(layer: str, part: str) -> str:
    return f"{LAYERS}.{layer}.{part}" if layer else part
