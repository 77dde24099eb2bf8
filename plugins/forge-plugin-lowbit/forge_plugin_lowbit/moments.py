"""AdamW with quantised moments: codes, and a scale for every block of elements."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_core.contracts.errors import JobError, Problem, did_you_mean
from forge_core.parallel.mesh import gather_objects, pipeline_group
from forge_kit.optim.groups import as_groups, names_in
from forge_plugin_lowbit.arithmetic import adamw
from forge_plugin_lowbit.blocks import Blocks, cut_problem, own_part, quantised_blocks, split_like
from forge_plugin_lowbit.optimizer import LowBitAdamW, contiguous_like
from forge_plugin_lowbit.rounding import Rounding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from forge_kit.optim.groups import Groups
    from forge_plugin_lowbit.formats import Format

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Slots of the averages of the gradient and of its square."""
SCALE = "_scale"
"""Suffix of the slots of scales."""


class QuantisedAdamW(LowBitAdamW):
    """`LowBitAdamW` with moments of a format of `forge_plugin_lowbit.formats`.

    State: of a quantised parameter `exp_avg`, `exp_avg_sq` (codes), `exp_avg_scale`, `exp_avg_sq_scale` (float32, one
    a block) and `step`; of others two float32 tensors like it.

    Args:
        params: as in `LowBitAdamW`, which also takes `settings`.
        format: EIGHT_BIT, FOUR_BIT or FLOAT8.
        block_size: elements that share a scale; a power of two.
        min_size: parameters with fewer elements keep float32 moments.
        exclude: globs over names of parameters that keep float32 moments.
        seed: seed of the random bits by which parameters in bfloat16 are rounded.
        mesh: the mesh over which DTensor parameters are split.

    Raises:
        JobError: a glob of `exclude` matches no parameter, or the mesh cuts through blocks.
    """

    def __init__(
        self,
        params: Groups,
        format: Format,
        *,
        block_size: int = 256,
        min_size: int = 4096,
        exclude: Sequence[str] = (),
        seed: int = 0,
        mesh: DeviceMesh | None = None,
        **settings: Any,
    ) -> None:
        groups = as_groups(params)
        names = names_in(groups)
        _check_globs(exclude, list(names.values()), mesh)
        blocks = quantised_blocks(names, block_size, min_size, exclude)
        problem = cut_problem(blocks, names, own_part(mesh))
        if problem is not None:
            raise JobError([problem.below("optimizer")])
        super().__init__(groups, QuantisedMoments(format, blocks), Rounding(names, seed, mesh), **settings)


class QuantisedMoments:
    """See `forge_plugin_lowbit.optimizer.Moments`.

    torchao stores such moments in its own tensor subclasses, which checkpoints cannot hold and of which only the
    8-bit one can be split. Here codes and scales are plain tensors, split like their parameter.

    Args:
        format: the format of the codes.
        blocks: blocks of the parameters whose moments are quantised; all others have float32 moments.
    """

    def __init__(self, format: Format, blocks: Mapping[Tensor, Blocks]) -> None:
        self._format = format
        self._blocks = blocks
        self._quantised = _over(format)

    def empty(self, parameter: Tensor) -> dict[str, Tensor]:
        """Codes and scales on the ranks that hold their blocks, or two float32 tensors like the parameter."""
        blocks = self._blocks.get(parameter)
        if blocks is None:
            return {slot: contiguous_like(parameter, torch.float32) for slot in MOMENTS}
        codes = {slot: split_like(parameter, blocks, self._format.packed, self._format.dtype) for slot in MOMENTS}
        scales = {slot + SCALE: split_like(parameter, blocks, blocks.size, torch.float32) for slot in MOMENTS}
        return codes | scales

    def update(self, parameter: Tensor) -> Callable[..., None]:
        """Returns one function for all quantised parameters, and torchao's update for the others."""
        return self._quantised if parameter in self._blocks else adamw

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """(blocks, size of a block), or flat for a parameter whose moments are float32."""
        return (-1, self._blocks[parameter].size) if parameter in self._blocks else (-1,)

    def inputs(self, parameter: Tensor, state: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """Codes (blocks, codes of a block) and scales (blocks,) of each moment, and the tables; or flat moments."""
        if parameter not in self._blocks:
            return tuple(state[slot].view(-1) for slot in MOMENTS)
        codes = self._blocks[parameter].size // self._format.packed
        shapes = {"": (-1, codes), SCALE: (-1,)}
        # In the order of arguments of the update: codes and scales of one moment, then of the other
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


def _check_globs(globs: Sequence[str], names: list[str], mesh: DeviceMesh | None) -> None:
    pipeline = pipeline_group(mesh)
    if pipeline is not None:
        # A glob may be for parameters of other pipeline ranks
        names = [name for part in gather_objects(names, pipeline) for name in part]
    problems = [
        Problem(f"optimizer.exclude.{number}", f"{glob!r} fits no parameter{did_you_mean(glob, names)}")
        for number, glob in enumerate(globs)
        if not any(fnmatchcase(name, glob) for name in names)
    ]
    if problems:
        raise JobError(problems)
