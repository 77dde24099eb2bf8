"""Moments in bfloat16."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchao.optim.adam import single_param_adam

from forge_core.parallel.mesh import local_part
from forge_plugin_lowbit.optimizer import STEP
from forge_plugin_lowbit.rounding import Place, place_of_part, random_bits, round_with

if TYPE_CHECKING:
    from forge_core.context import BuildContext
    from forge_core.engine.parameters import NamedParameters
    from forge_plugin_lowbit.adamw import AdamWBF16

MOMENTS = ("exp_avg", "exp_avg_sq")


class BF16Moments:
    """See `forge_plugin_lowbit.optimizer.Moments`."""

    def __init__(self, component: AdamWBF16, context: BuildContext, parameters: NamedParameters) -> None:
        self._seed = context.job.job.seed
        self._names = {item.parameter: item.name for item in parameters}
        self._places = {item.parameter: place_of_part(item.parameter) for item in parameters}
        self.update = update_stochastically if component.stochastic_rounding else update_to_nearest

    def new(self, parameter: Tensor) -> dict[str, Tensor]:
        return {slot: tensor.zero_() for slot, tensor in self.empty(parameter).items()}

    def empty(self, parameter: Tensor) -> dict[str, Tensor]:
        return {slot: torch.empty_like(parameter, dtype=torch.bfloat16, requires_grad=False) for slot in MOMENTS}

    def inputs(self, parameter: Tensor, state: dict[str, Any]) -> tuple[Any, ...]:
        step, moments = state[STEP], tuple(local_part(state[slot]) for slot in MOMENTS)
        if self.update is update_to_nearest:
            return step, *moments
        return step, *moments, self._key(parameter, int(step)), self._places[parameter]

    def _key(self, parameter: Tensor, step: int) -> Tensor:
        """(2,) int64, each of 32 bits: what distinguishes the random bits of this update."""
        text = f"{self._seed}:rounding:{step}:{self._names[parameter]}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        halves = [int.from_bytes(half, "little") for half in (digest[:4], digest[4:])]
        return torch.tensor(halves).to(parameter.device, non_blocking=True)


def update_to_nearest(
    parameter: Tensor,
    gradient: Tensor,
    step: Tensor,
    average: Tensor,
    square: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
) -> None:
    """torchao's AdamW: what it copies to the moments is rounded to the nearest."""
    single_param_adam(
        parameter, gradient, step, average, square, None, lr, beta1, beta2, weight_decay, eps, True, False
    )


def update_stochastically(
    parameter: Tensor,
    gradient: Tensor,
    step: Tensor,
    average: Tensor,
    square: Tensor,
    key: Tensor,
    place: Place,
    lr: Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
) -> None:
    """torchao's AdamW on float32 moments, which are then rounded."""
    average_32, square_32 = average.float(), square.float()
    single_param_adam(
        parameter, gradient, step, average_32, square_32, None, lr, beta1, beta2, weight_decay, eps, True, False
    )
    bits = random_bits(average.shape, place, key)
    average.copy_(round_with(average_32, bits & 0xFFFF))
    square.copy_(round_with(square_32, bits >> 16))
