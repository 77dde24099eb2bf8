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
