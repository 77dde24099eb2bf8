"""AdamW with moments in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_kit.optim.groups import Groups, as_groups, names_in
from forge_plugin_lowbit.arithmetic import adamw
from forge_plugin_lowbit.optimizer import STEP, LowBitAdamW, contiguous_like
from forge_plugin_lowbit.rounding import Rounding, random_bits, round_with

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MOMENTS = ("exp_avg", "exp_avg_sq")


class BF16AdamW(LowBitAdamW):
    """`LowBitAdamW` with moments in bfloat16.

    State: `exp_avg` and `exp_avg_sq` like each parameter, and `step`.

    Args:
        params: as in `LowBitAdamW`, which also takes `settings`.
        stochastic_rounding: false rounds to the nearest.
        seed: seed of the random bits.
        mesh: the mesh over which DTensor parameters are split.
    """

    def __init__(
        self,
        params: Groups,
        *,
        stochastic_rounding: bool = True,
        seed: int = 0,
        mesh: DeviceMesh | None = None,
        **settings: Any,
    ) -> None:
        groups = as_groups(params)
        rounding = Rounding(names_in(groups), seed, mesh)
        super().__init__(groups, BF16Moments(rounding, stochastic_rounding), rounding, **settings)


class BF16Moments:
    """See `forge_plugin_lowbit.optimizer.Moments`.

    Args:
        stochastic: whether moments are rounded by random bits, else to the nearest.
    """

    def __init__(self, rounding: Rounding, stochastic: bool) -> None:
        self._rounding = rounding
        self._stochastic = stochastic

    def empty(self, parameter: Tensor) -> dict[str, Tensor]:
        """Both moments like the parameter in shape and layout, in bfloat16."""
        return {slot: contiguous_like(parameter, torch.bfloat16) for slot in MOMENTS}

    def update(self, parameter: Tensor) -> Callable[..., None]:
        """Returns `adamw_stochastic`, or torchao's update, whose copies into bfloat16 round to the nearest."""
        return adamw_stochastic if self._stochastic else adamw

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Flat: elements do not depend on each other, so that one kernel serves parameters of all shapes."""
        return (-1,)

    def inputs(self, parameter: Tensor, state: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """Both moments, flat; for stochastic rounding also key and place of the random bits."""
        moments = tuple(state[slot].view(-1) for slot in MOMENTS)
        if not self._stochastic:
            return moments
        return *moments, *self._rounding.of(parameter, state[STEP], "rounding")


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
    """AdamW over moments in float32, which are then rounded stochastically."""
    average_32, square_32 = average.float(), square.float()
    adamw(parameter, gradient, step, average_32, square_32, *settings)
    # One word of random bits serves both moments: 16 bits decide a rounding to bfloat16.
    bits = random_bits(place, key, average.shape[0])
    average.copy_(round_with(average_32, bits & 0xFFFF))
    square.copy_(round_with(square_32, bits >> 16))
