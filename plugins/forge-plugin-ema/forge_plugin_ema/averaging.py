"""An optimizer that averages the weights after each of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.optimizer import HasEvaluationWeights
from forge_core.parallel.mesh import local_part
from forge_kit.torch_internals import foreach_lerp_

if TYPE_CHECKING:
    from forge_plugin_ema.ema import EMA

AVERAGES = "averages"
"""Key of the averages, by parameter, in the optimizer's state. They are not in the state of each parameter: optimizers
treat a parameter with any state as one that they have stepped before."""


def with_average(optimizer: torch.optim.Optimizer, ema: EMA) -> torch.optim.Optimizer:
    """Make the optimizer average after each step, by deriving its class from `Averaging` and its own.

    Raises:
        ForgeError: the optimizer has weights for evaluation already.
    """
    if isinstance(optimizer, HasEvaluationWeights):
        name = type(optimizer).__name__
        raise ForgeError(f"plugins.ema: {name} has its own weights for evaluation; leave out one of the two")
    # Not an object around it: schedules, hooks and checkpoints use its own groups and state
    kind: Any = type(optimizer)
    optimizer.__class__ = type(f"Averaged{kind.__name__}", (Averaging, kind), {"ema": ema})
    return optimizer


class Averaging(torch.optim.Optimizer):
    """Mixin that averages after each step; see `forge_core.contracts.optimizer.HasEvaluationWeights`."""

    ema: EMA

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        """Step, then move each average by 1 - decay towards its parameter, unless `found_inf` prevents the update."""
        averages = self._averages
        # Before the step, so that an average starts from the initial weights; a parameter may have been frozen so far.
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in averages:
                    averages[parameter] = parameter.detach().clone()
        result = super().step(closure)  # type: ignore[arg-type]
        share = 1 - self.ema.next_decay()
        weights = [local_part(parameter.detach()) for parameter in averages]
        kept = [local_part(average) for average in averages.values()]
        if getattr(self, "found_inf", None) is not None:  # whether there was an update is known only on the device
            taken = share * (1 - self.found_inf)  # type: ignore[attr-defined]
            for average, weight in zip(kept, weights, strict=True):
                average.lerp_(weight, taken.to(average))  # `foreach_lerp_` would wait for the device
        elif kept:
            foreach_lerp_(kept, weights, share)
        return result

    @torch.no_grad()
    def eval(self) -> None:
        """Swap parameters and averages, in place."""
        for parameter, average in self._averages.items():
            # One at a time, so that memory for a single parameter suffices
            weights = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(weights)

    def train(self) -> None:
        """Swaps them again: an exchange brings the trained weights back to the bit."""
        self.eval()

    def evaluation_weights(self) -> dict[Tensor, Tensor]:
        """Returns the averages: of parameters that trained in at least one step so far."""
        return dict(self._averages)

    def load_evaluation_weights(self, weights: Mapping[Tensor, Tensor]) -> None:
        """Takes averages from a checkpoint; `step` begins one for each parameter that has none there."""
        self._averages.update(weights)

    @property
    def _averages(self) -> dict[Tensor, Tensor]:
        averages: dict[Tensor, Tensor] = self.state[AVERAGES]  # type: ignore[index]
        return averages
