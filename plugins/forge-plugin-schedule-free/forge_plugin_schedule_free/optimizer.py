"""The optimizers of `schedulefree`, with an exact exchange of their two kinds of weights and support for checkpoints.

In the paper's letters: parameters are y during training; x is their average, used in evaluation; z is in the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import schedulefree
import torch
from torch import Tensor


class ExactModes(torch.optim.Optimizer):
    """`forge_core.contracts.optimizer.HasEvaluationWeights` for an optimizer of the package.

    The package recomputes y from x after an evaluation, which rounds. Here y is stored meanwhile, so that evaluations
    leave no trace in training.
    """

    group_state = ("k", "weight_sum", "lr_max")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._trained: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            group["train_mode"] = True  # the package refuses to step otherwise, and its own switch is not used here

    @torch.no_grad()
    def eval(self) -> None:
        """Stores y and puts x in its place. Without effect in evaluation mode."""
        if self._trained:  # parameters are x already
            return
        for parameter, average in self._averages():
            # Kept aside, to be put back when training continues
            self._trained[parameter] = parameter.detach().clone()
            parameter.copy_(average)

    @torch.no_grad()
    def train(self) -> None:
        """Puts back y as it was stored, to the bit. Without effect in training mode."""
        for parameter, trained in self._trained.items():
            parameter.copy_(trained)
        self._trained.clear()

    def evaluation_weights(self) -> dict[Tensor, Tensor]:
        """Computes x of the parameters that have been stepped; in training mode only, when parameters are y."""
        return dict(self._averages())

    def load_evaluation_weights(self, weights: Mapping[Tensor, Tensor]) -> None:
        """Does nothing: they follow from the parameters and the state."""

    @torch.no_grad()
    def _averages(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields x = y + (1 - 1/β)(z - y) of the parameters that have been stepped."""
        for group in self.param_groups:
            beta = group["betas"][0] if "betas" in group else group["momentum"]
            for parameter in group["params"]:
                # `in` first: the state is a defaultdict, in which a look-up would leave an empty entry
                z = self.state[parameter].get("z") if parameter in self.state else None
                if z is not None:
                    # From y = β x + (1 - β) z
                    yield parameter, torch.lerp(parameter.detach(), z, 1 - 1 / beta)


class AdamWScheduleFree(ExactModes, schedulefree.AdamWScheduleFree):  # type: ignore[misc]
    """See `schedulefree.AdamWScheduleFree`."""


class SGDScheduleFree(ExactModes, schedulefree.SGDScheduleFree):  # type: ignore[misc]
    """See `schedulefree.SGDScheduleFree`."""
