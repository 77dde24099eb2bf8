"""What a model's tap points see in one forward pass, by plain hooks: without the stage `taps`, to compare with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.contracts.data import Batch
from forge_kit.taps import TapPoint, tap_points

DIMENSIONS = {"rest": 3, "hidden": 3, "partial": 3, "heads": 4, "whole": 3, "images": 3}
"""Dimensions of a tensor, by the axes of its point; the first two are sequences and positions, but of `images`."""


def seen_at_points(model: Any, batch: Batch, run: Callable[[Batch], Any] | None = None) -> dict[str, list[Tensor]]:
    """Returns the tensors that each point sees in `model(batch)`, in order; without `pattern`, which no module has.

    Args:
        model: with `tap_points`.
        batch: of whole sequences.
        run: what to call in place of the model.
    """
    points = {name: point for name, point in tap_points(model).items() if point.side != "pattern"}
    seen: dict[str, list[Tensor]] = {name: [] for name in points}
    hooks = [_hook(model, point, seen[name]) for name, point in points.items()]
    try:
        with torch.no_grad():
            (run or model)(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _hook(model: nn.Module, point: TapPoint, into: list[Tensor]) -> Any:
    module = model.get_submodule(point.module)
    if point.side in ("input", "carry_in"):
        return module.register_forward_pre_hook(lambda _, args: into.append(_picked(args, point)))
    return module.register_forward_hook(lambda _, args, output: into.append(_picked(output, point)))


def _picked(value: Any, point: TapPoint) -> Tensor:
    if point.side.startswith("carry"):
        value = value[0] if isinstance(value[0], tuple) else value
        return value[0]  # type: ignore[no-any-return]
    return value if isinstance(value, Tensor) else value[point.index]  # type: ignore[no-any-return]


def used_at(model: Any, batch: Batch, point: TapPoint, draws: int = 4) -> Tensor:
    """Returns where `model(batch)` changes when the values at a point do: (B, S) bool.

    Args:
        model: with `tap_points`.
        batch: of whole sequences.
        point: of the model, not a `pattern`, with values that can be changed.
        draws: changes that are tried; a choice of experts may be the same after one.
    """
    with torch.no_grad():
        expected: Tensor = model(batch)
        used = torch.zeros(expected.shape[:2], dtype=torch.bool)
        for seed in range(draws):
            generator = torch.Generator().manual_seed(seed)
            hook = _replacing(model, point, lambda x, generator=generator: x + _noise(x, generator))
            try:
                used |= (model(batch) != expected).any(-1)
            finally:
                hook.remove()
    return used


def _noise(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator).to(x) * (1 + x.abs())


def _replacing(model: nn.Module, point: TapPoint, change: Callable[[Tensor], Tensor]) -> Any:
    module, index = model.get_submodule(point.module), point.index

    def at(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*values[:index], change(values[index]), *values[index + 1 :])

    if point.side == "input":
        return module.register_forward_pre_hook(lambda _, args: at(args))
    if point.side == "carry_in":
        return module.register_forward_pre_hook(lambda _, args: (at(args[0]), *args[1:]))
    return module.register_forward_hook(lambda _, args, out: change(out) if isinstance(out, Tensor) else at(out))
