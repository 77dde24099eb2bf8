"""Moments that are kept as codes, with a scale for every block of elements."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_core.contracts.errors import JobError, Problem, did_you_mean
from forge_core.parallel.mesh import gather_objects, pipeline_group
from forge_plugin_lowbit.arithmetic import adamw
from forge_plugin_lowbit.blocks import Blocks, blocks_of, check_whole, split_like
from forge_plugin_lowbit.optimizer import LowBitAdamW, contiguous_like
from forge_plugin_lowbit.rounding import Rounding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.parameters import NamedParameter, NamedParameters
    from forge_plugin_lowbit.adamw import AdamW4bit, AdamW8bit, AdamWFloat8
    from forge_plugin_lowbit.formats import Format

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Slots of the averages of the gradient and of its square."""
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
    blocks: dict[NamedParameter, Blocks] = {}
    for item in parameters:
        found = blocks_of(item.parameter.shape, component.block_size)
        small = item.parameter.numel() < component.min_size
        if found is not None and not small and not any(fnmatchcase(item.name, p) for p in component.exclude):
            blocks[item] = found
    check_whole(blocks, context.mesh)
    moments = QuantisedMoments(format, {item.parameter: found for item, found in blocks.items()})
    return LowBitAdamW(component, parameters, moments, Rounding(context, parameters))


class QuantisedMoments:
    """See `forge_plugin_lowbit.optimizer.Moments`.

    torchao keeps such moments in tensors of classes of its own, which checkpoints cannot hold and of which only the one
    with 8 bits bears to be split. Here codes and scales are plain tensors, split like their parameter.

    Args:
        blocks: of the parameters whose moments are quantised; those of others are float32.
    """

    def __init__(self, format: Format, blocks: Mapping[Tensor, Blocks]) -> None:
        self._format = format
        self._blocks = blocks
        self._quantised = _over(format)

    def empty(self, parameter: Tensor) -> dict[str, Tensor]:
        blocks = self._blocks.get(parameter)
        if blocks is None:
            return {slot: contiguous_like(parameter, torch.float32) for slot in MOMENTS}
        codes = {slot: split_like(parameter, blocks, self._format.packed, self._format.dtype) for slot in MOMENTS}
        scales = {slot + SCALE: split_like(parameter, blocks, blocks.size, torch.float32) for slot in MOMENTS}
        return codes | scales

    def update(self, parameter: Tensor) -> Callable[..., None]:
        return self._quantised if parameter in self._blocks else adamw

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        return (-1, self._blocks[parameter].size) if parameter in self._blocks else (-1,)

    def inputs(self, parameter: Tensor, state: Mapping[str, Tensor]) -> tuple[Any, ...]:
        if parameter not in self._blocks:
            return tuple(state[slot].view(-1) for slot in MOMENTS)
        codes = self._blocks[parameter].size // self._format.packed
        shapes = {"": (-1, codes), SCALE: (-1,)}
        parts = tuple(state[slot + kind].view(shape) for slot in MOMENTS for kind, shape in shapes.items())
        return *parts, *self._format.tables(parts[0])


def _over(format: Format) -> Callable[..., None]:
    """AdamW over the moments of a format."""

    def update(
        parameter: Tensor,
        gradient: Tensor,
        step: Tensor,
        average_codes: Tensor,
        average_scales: Tensor,
        square_codes: Tensor,
        square_scales: Tensor,
        average_table: Tensor,
        square_table: Tensor,
        *settings: Any,
    ) -> None:
        average = format.read(average_codes, average_scales, average_table)
        square = format.read(square_codes, square_scales, square_table)
        adamw(parameter, gradient, step, average, square, *settings)
        format.write(average, average_codes, average_scales, average_table)
        format.write(square, square_codes, square_scales, square_table)

    return update


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
