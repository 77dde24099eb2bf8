"""What heads attend to in a prompt. Shapes: L layers, H heads, S positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.model import Model
from forge_plugin_taps.lens.activations import attention_weights


@frozen
class AttentionMaps:
    """Weights of attention."""

    layers: Sequence[str]
    heads: Sequence[int]
    weights: Tensor
    """(L, H, S, S), on the CPU: of each query (row) to each key."""


def attention_maps(
    model: Model, ids: Sequence[int] | Tensor, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> AttentionMaps:
    """Compute the weights of attention in a prompt, from queries and keys as the kernel receives them.

    Args:
        model: whole, as `forge_core.load_model` returns it without `parallel`.
        ids: (S), a prompt.
        layers: numbers of layers; None: all.
        heads: numbers of query heads, the same in all layers; None: all.

    Raises:
        ForgeError: there is no such layer or head, or an empty list of them; or layers have different numbers of heads
            and none are chosen.
    """
    names = list(model.layers)
    # Without a choice, those with a softmax: in others, such as linear attention, nothing has weights
    chosen = [name for name in names if not _is_other(model, name)] if layers is None else [str(n) for n in layers]
    if missing := [name for name in chosen if name not in names]:
        raise ForgeError(f"there is no layer {missing[0]}; the model has {names[0]} to {names[-1]}")
    if other := [name for name in chosen if _is_other(model, name)]:
        kind = type(_mixer(model, other[0])).__name__
        raise ForgeError(f"layer {other[0]} has a {kind}, which gives positions no weights; choose other layers")
    if not chosen or (heads is not None and not heads):
        raise ForgeError("no layer or no head is chosen; name at least one of each, or None for all")
    device = next(model.parameters()).device
    patterns = _patterns(model, torch.as_tensor(ids, device=device).view(1, -1), chosen)
    counts = [len(pattern) for pattern in patterns]
    if heads is None and len({*counts}) > 1:
        raise ForgeError(f"layers have {sorted({*counts})} heads; choose some by number, or one layer")
    numbers = range(counts[0]) if heads is None else heads
    if wrong := [number for number in numbers if not 0 <= number < min(counts)]:
        raise ForgeError(f"there is no head {wrong[0]}; there are {min(counts)}, from 0")
    return AttentionMaps(chosen, list(numbers), torch.stack([pattern[list(numbers)] for pattern in patterns]))


@torch.no_grad()
def _patterns(model: Model, ids: Tensor, layers: Sequence[str]) -> list[Tensor]:
    """Returns the weights of the layers' heads, (H, S, S) each."""
    mixers = {name: _mixer(model, name) for name in layers}
    patterns: dict[str, Tensor] = {}

    def hook(name: str) -> RemovableHandle:
        def before(core: nn.Module, args: tuple[Any, ...]) -> None:
            q, k, _values, *others = args
            # To the CPU layer by layer: S x S weights of all heads may not fit on the device together
            patterns[name] = attention_weights(core, q, k, *others)[0].cpu()

        return mixers[name].register_forward_pre_hook(before)

    handles = [hook(name) for name in layers]
    try:
        model({"input_ids": ids})
    finally:
        for handle in handles:
            handle.remove()
    return [patterns[name] for name in layers]


def _is_other(model: Model, layer: str) -> bool:
    """Whether a layer mixes positions by something else than attention; see `forge_kit.nn.head_mixers`."""
    names = [name for name in model.sequence_mixers() if name.startswith(f"layers.{layer}.")]
    return bool(names) and getattr(model.get_submodule(names[0]), "mixes_heads", False)


def _mixer(model: Model, layer: str) -> nn.Module:
    """Returns the module of a layer in which positions attend to others.

    Raises:
        ForgeError: the layer has none.
    """
    name = next((name for name in model.sequence_mixers() if name.startswith(f"layers.{layer}.")), None)
    if name is None:
        raise ForgeError(f"layer {layer} of {type(model).__name__} has no module in sequence_mixers(), so no attention")
    return model.get_submodule(name)
