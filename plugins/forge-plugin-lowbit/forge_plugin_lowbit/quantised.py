"""Moments that are kept as codes, with a scale for every block of elements."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchao.optim.adam import single_param_adam

from forge_core.config.suggest import did_you_mean
from forge_core.errors import JobError, Problem
from forge_core.parallel.mesh import gather_objects, local_part, pipeline_group
from forge_plugin_lowbit.blocks import Blocks, blocks_of, check_whole, split_like
from forge_plugin_lowbit.optimizer import STEP, LowBitAdamW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forge_core.context import BuildContext
    from forge_core.engine.parameters import NamedParameters
    from forge_plugin_lowbit.adamw import AdamW4bit, AdamW8bit, AdamWFloat8
    from forge_plugin_lowbit.formats import Format

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Slots of the averages of the gradient and of its square, and whether they have signs."""
SCALE = "_scale"
"""Ends the slots of scales."""


def quantised(
    component: AdamW8bit | AdamW4bit | AdamWFloat8, format: Format, context: BuildContext, parameters: NamedParameters
) -> LowBitAdamW:
    """The optimizer with moments of a format.

    Raises:
        JobError: a pattern of `exclude` fits no parameter, or a stage cuts through blocks.
    """
    _check_patterns(component.exclude, [item.name for item in parameters], context)
    blocks: dict[Tensor, Blocks] = {}
    for item in parameters:
        excluded = any(fnmatchcase(item.name, pattern) for pattern in component.exclude)
        found = blocks_of(item.parameter.shape, component.block_size)
        if found is not None and not excluded and item.parameter.numel() >= component.min_size:
            check_whole(item, found)
            blocks[item.parameter] = found
    return LowBitAdamW(component, parameters, QuantisedMoments(format, blocks))


class QuantisedMoments:
    """See `forge_plugin_lowbit.optimizer.Moments`.

    torchao keeps such moments in tensors of classes of its own, which checkpoints cannot hold and of which only the one
    with 8 bits bears to be split. Here codes and scales are plain tensors, split like their parameter, and are put into
    one of torchao's only while it is updated.

    Args:
        blocks: of the parameters whose moments are quantised; those of others are float32.
    """

    def __init__(self, format: Format, blocks: dict[Tensor, Blocks]) -> None:
        self._format = format
        self._blocks = blocks
        self.update = update

    def new(self, parameter: Tensor) -> dict[str, Tensor]:
        return {slot: tensor.zero_() for slot, tensor in self.empty(parameter).items()}

    def empty(self, parameter: Tensor) -> dict[str, Tensor]:
        blocks = self._blocks.get(parameter)
        if blocks is None:
            return {slot: torch.empty_like(parameter, dtype=torch.float32, requires_grad=False) for slot in MOMENTS}
        codes, scales = self._format.packed, blocks.size
        return {slot: split_like(parameter, blocks, codes, self._format.dtype) for slot in MOMENTS} | {
            slot + SCALE: split_like(parameter, blocks, scales, torch.float32) for slot in MOMENTS
        }

    def inputs(self, parameter: Tensor, state: dict[str, Any]) -> tuple[Any, ...]:
        own = {slot: local_part(value) for slot, value in state.items()}
        if parameter not in self._blocks:
            return own[STEP], *(own[slot] for slot in MOMENTS)
        shape = local_part(parameter).shape
        wrap = self._format.wrap
        return own[STEP], *(wrap(own[slot], own[slot + SCALE], signed, shape) for slot, signed in MOMENTS.items())


def update(
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
    """torchao's AdamW."""
    single_param_adam(
        parameter, gradient, step, average, square, None, lr, beta1, beta2, weight_decay, eps, True, False
    )


def _check_patterns(patterns: Sequence[str], names: list[str], context: BuildContext) -> None:
    pipeline = pipeline_group(context.mesh)
    if pipeline is not None:
        names = [name for part in gather_objects(names, pipeline) for name in part]
    problems = [
        Problem(f"optimizer.exclude.{number}", f"{pattern!r} fits no parameter{did_you_mean(pattern, names)}")
        for number, pattern in enumerate(patterns)
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if problems:
        raise JobError(problems)
