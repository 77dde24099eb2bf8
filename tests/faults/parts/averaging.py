"""An optimizer that keeps other weights for evaluation, with every sort of state that one may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from forge_core.contracts.components import OptimizerComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.optimizer import NamedParameters


@frozen(kw_only=True)
class Averaging(OptimizerComponent):
    """Momentum SGD; `eval()` puts the running average of the weights in their place, `train()` puts them back."""

    lr: float = 0.05

    def build(self, context: BuildContext, parameters: NamedParameters) -> torch.optim.Optimizer:
        return AveragingOptimizer(parameters.groups(decay=0.0), {"lr": self.lr, "updates": 0})


class AveragingOptimizer(torch.optim.Optimizer):
    """State: a momentum and an average like the parameter, a counter that is a tensor, a number; a counter a group."""

    group_state = ("updates",)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["updates"] += 1
            for parameter in group["params"]:
                self._update(parameter, group["lr"], group["updates"])

    def _update(self, parameter: torch.Tensor, rate: float, updates: int) -> None:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state |= {"momentum": torch.zeros_like(parameter), "average": parameter.clone()}
            state |= {"count": torch.zeros((), dtype=torch.int64), "largest": 0.0}
        state["count"] += 1
        state["largest"] = max(state["largest"], float(parameter.grad.abs().max()))
        state["momentum"].mul_(0.9).add_(parameter.grad / (1 + state["largest"]))
        parameter.sub_(state["momentum"], alpha=rate)
        state["average"].lerp_(parameter, 1 / updates)

    def evaluation_weights(self) -> dict[torch.Tensor, torch.Tensor]:
        return {parameter: state["average"] for parameter, state in self.state.items()}

    def load_evaluation_weights(self, weights: dict[torch.Tensor, torch.Tensor]) -> None:
        """The state has them."""

    def eval(self) -> None:
        self._swap()

    def train(self) -> None:
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, state in self.state.items():
            other = state["average"].clone()
            state["average"].copy_(parameter)
            parameter.copy_(other)
