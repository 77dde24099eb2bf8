"""Blocks of elements that share a scale, and how their state is split over ranks.

Elements are counted in row-major order through the whole parameter, as torchao counts them, and every `block_size` of
them are a block. So blocks do not depend on how the parameter is split, provided that no block is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge_core.contracts.errors import Problem
from forge_kit.optim.whole_matrices import Box, own_box

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SMALLEST = 8
"""Smallest size of a block, in elements."""


@frozen
class Blocks:
    """The blocks of a parameter."""

    size: int
    """Elements of a block."""
    rows: int
    """Smallest number of rows whose elements are a whole number of blocks."""

    @classmethod
    def of(cls, shape: Sequence[int], size: int) -> Blocks:
        """Returns the blocks of a parameter (…, rows, columns)."""
        return cls(size, size // math.gcd(size, shape[-1]))

    def shrunk(self, shape: Sequence[int], factor: int) -> tuple[int, ...]:
        """Shape of a tensor with one number for `factor` elements of a parameter (…, rows, columns) or a part of it."""
        # In units of `self.rows` rows: a block, or a code, may span several of them
        *others, rows, columns = shape
        return *others, rows // self.rows, columns * self.rows // factor

    def cuts_none(self, offsets: Sequence[int], sizes: Sequence[int], columns: int) -> bool:
        """Whether a part of a parameter with `columns` columns consists of whole blocks."""
        # Blocks that span rows need all columns
        if self.rows > 1 and sizes[-1] != columns:
            return False
        unit = self.size if self.rows == 1 else columns
        last = offsets[-1] % unit == 0 and sizes[-1] % unit == 0
        return last and offsets[-2] % self.rows == 0 and sizes[-2] % self.rows == 0


def blocks_of(shape: Sequence[int], size: int) -> Blocks | None:
    """Returns the blocks of a parameter (…, rows, columns).

    None if it has fewer dimensions, or its rows are not a whole number of blocks.
    """
    if len(shape) < 2 or not math.prod(shape):
        return None
    blocks = Blocks.of(shape, size)
    return blocks if shape[-2] % blocks.rows == 0 else None


def quantised_blocks(
    names: Mapping[Tensor, str], block_size: int, min_size: int, exclude: Sequence[str]
) -> dict[Tensor, Blocks]:
    """Returns the blocks of each parameter whose moments are quantised; all others keep float32 moments."""
    blocks: dict[Tensor, Blocks] = {}
    for parameter, name in names.items():
        of_parameter = blocks_of(parameter.shape, block_size)
        small = parameter.numel() < min_size
        if of_parameter is not None and not small and not any(fnmatchcase(name, glob) for glob in exclude):
            blocks[parameter] = of_parameter
    return blocks


Parts = Callable[[Tensor], Iterable[Box]]
"""Function from a parameter to the parts of it that ranks hold."""


def cut_problem(blocks: Mapping[Tensor, Blocks], names: Mapping[Tensor, str], parts: Parts) -> Problem | None:
    """Returns the problem that ranks would hold parts of blocks, with a block size that avoids it; None if none does.

    Args:
        blocks: blocks of the quantised parameters.
        names: their names.
        parts: the parts of a parameter to check.
    """
    cut = [(parameter, box) for parameter, own in blocks.items() if (box := _cut(parameter, own, parts)) is not None]
    if not cut:
        return None
    parameter, box = cut[0]
    size = blocks[parameter].size
    part = f"{[side.stop - side.start for side in box]} of {names[parameter]}, {list(parameter.shape)}"
    more = f", and so with {len(cut) - 1} more" if len(cut) > 1 else ""
    message = f"a rank has {part}, which is not made of whole blocks of {size} elements{more}"
    hint = "add such parameters to optimizer.exclude"
    # The first of these is the largest that all parameters allow
    for smaller in (size >> shift for shift in range(1, size.bit_length()) if size >> shift >= SMALLEST):
        if not any(_cut(parameter, Blocks.of(parameter.shape, smaller), parts) for parameter, _ in cut):
            hint = f"set it to {smaller}, or {hint}"
            break
    return Problem("block_size", f"{message}; {hint}")


def _cut(parameter: Tensor, blocks: Blocks, parts: Parts) -> Box | None:
    """Returns the first part that does not consist of whole blocks."""
    for box in parts(parameter):
        offsets, sizes = [side.start for side in box], [side.stop - side.start for side in box]
        if all(sizes) and not blocks.cuts_none(offsets, sizes, parameter.shape[-1]):
            return box
    return None


def own_part(mesh: DeviceMesh | None) -> Parts:
    """Returns this rank's part of parameters as the stages have split them."""
    return lambda parameter: [own_box(parameter, mesh)]


def sharded_parts(ranks: int) -> Parts:
    """Returns every rank's part of whole parameters that will be split along dimension 0, as by `fsdp`."""

    def parts(parameter: Tensor) -> Iterator[Box]:
        rows, *others = parameter.shape
        # As `torch.chunk` divides: the last ranks may have fewer rows, or none
        share = -(-rows // ranks)
        for start in range(0, rows, share):
            yield slice(start, min(rows, start + share)), *(slice(0, size) for size in others)

    return parts


def split_like(parameter: Tensor, blocks: Blocks, factor: int, dtype: torch.dtype) -> Tensor:
    """Allocates one number for `factor` elements of a parameter, where the rank holds those elements."""
    shape = torch.Size(blocks.shrunk(parameter.shape, factor))
    if not isinstance(parameter, DTensor):
        return torch.empty(shape, dtype=dtype, device=parameter.device)
    own = parameter.to_local()
    memory = torch.empty(blocks.shrunk(own.shape, factor), dtype=dtype, device=own.device)
    # Shape and stride are given, as DTensor would infer them from equal parts; a check would be a collective
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        memory, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )
