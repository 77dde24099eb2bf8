"""Moments in bfloat16."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from forge_core.parallel.whole_matrices import own_box
from forge_plugin_lowbit.arithmetic import adamw
from forge_plugin_lowbit.optimizer import STEP, contiguous_like
from forge_plugin_lowbit.rounding import place_of, random_bits, round_with

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from forge_core.context import BuildContext
    from forge_core.engine.parameters import NamedParameters
    from forge_plugin_lowbit.adamw import AdamWBF16

MOMENTS = ("exp_avg", "exp_avg_sq")


class BF16Moments:
    """See `forge_plugin_lowbit.optimizer.Moments`."""

    def __init__(self, component: AdamWBF16, context: BuildContext, parameters: NamedParameters) -> None:
        self._stochastic = component.stochastic_rounding
        self._seed = context.job.job.seed
        self._names: dict[Tensor, str] = {item.parameter: item.name for item in parameters}
        self._places: dict[Tensor, Tensor] = {}
        for item in parameters:
            box = own_box(item.parameter, context.mesh)
            offsets, sizes = [side.start for side in box], [side.stop - side.start for side in box]
            place = place_of(offsets, sizes, item.parameter.shape)
            self._places[item.parameter] = torch.tensor(place, device=context.device)

    def empty(self, parameter: Tensor) -> dict[str, Tensor]:
        return {slot: contiguous_like(parameter, torch.bfloat16) for slot in MOMENTS}

    def update(self, parameter: Tensor) -> Callable[..., None]:
        return adamw_stochastic if self._stochastic else adamw

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        return (-1,)

    def inputs(self, parameter: Tensor, state: Mapping[str, Tensor]) -> tuple[Any, ...]:
        moments = tuple(state[slot].view(-1) for slot in MOMENTS)
        if not self._stochastic:
            return moments
        return *moments, self._key(parameter, state[STEP]), self._places[parameter]

    def _key(self, parameter: Tensor, step: Tensor) -> Tensor:
        """(2,) int64, each of 32 bits: what distinguishes the random bits of this update."""
        number = 0 if isinstance(step, FakeTensor) else int(step)
        text = f"{self._seed}:rounding:{number}:{self._names[parameter]}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        halves = [int.from_bytes(half, "little") for half in (digest[:4], digest[4:])]
        return torch.tensor(halves).to(parameter.device, non_blocking=True)


def adamw_stochastic(
    parameter: Tensor,
    gradient: Tensor,
    step: Tensor,
    average: Tensor,
    square: Tensor,
    key: Tensor,
    place: Tensor,
    *settings: Any,
) -> None:
    """AdamW over moments in float32, which are then rounded."""
    average_32, square_32 = average.float(), square.float()
    adamw(parameter, gradient, step, average_32, square_32, *settings)
    bits = random_bits(place, key, average.shape[0])
    average.copy_(round_with(average_32, bits & 0xFFFF))
    square.copy_(round_with(square_32, bits >> 16))
