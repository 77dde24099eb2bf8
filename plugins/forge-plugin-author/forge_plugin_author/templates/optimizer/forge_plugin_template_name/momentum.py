"""A plain torch optimizer, independent of Forge."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class MomentumDescent(torch.optim.Optimizer):
    """m <- momentum m + g;  w <- w - lr (m + weight_decay w)."""

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Rates are read from the groups, where the engine writes them."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"].mul_(group["momentum"]).add_(gradient)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(momentum, alpha=-group["lr"])
