"""What a model's tap points see in one forward pass, by plain hooks: without the stage `taps`, to compare with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from forge_core.contracts.data import Batch
from forge_kit.nn.taps import TapPoint, tap_points

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
    hooks = [
        point.hook(model.get_submodule(point.module), partial(_noted, seen[name])) for name, point in points.items()
    ]
    try:
        with torch.no_grad():
            (run or model)(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _noted(into: list[Tensor], x: Tensor) -> Tensor:
    into.append(x)
    return x


def used_at(model: Any, batch: Batch, point: TapPoint, expected: Tensor, draws: int = 4) -> Tensor:
    """Returns where `model(batch)` changes when the values at a point do: (B, S) bool.

    Args:
        model: with `tap_points`.
        batch: of whole sequences.
        point: of the model, not a `pattern`, with values that can be changed.
        expected: `model(batch)`, the same for all points.
        draws: changes that are tried at most; a choice of experts may be the same after one.
    """
    with torch.no_grad():
        used = torch.zeros(expected.shape[:2], dtype=torch.bool)
        for seed in range(draws):
            if bool(used.all()):  # no further change could add a place
                break
            generator = torch.Generator().manual_seed(seed)
            hook = point.hook(model.get_submodule(point.module), partial(_with_noise, generator))
            try:
                used |= (model(batch) != expected).any(-1)
            finally:
                hook.remove()
    return used


def _with_noise(generator: torch.Generator, x: Tensor) -> Tensor:
    return x + torch.randn(x.shape, generator=generator).to(x) * (1 + x.abs())
