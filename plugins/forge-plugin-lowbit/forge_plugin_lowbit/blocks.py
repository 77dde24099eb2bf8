"""Which elements of a parameter share a scale, and how what is kept for each block is split over ranks.

Elements are counted row by row through the whole parameter, as torchao counts them, and every so many are a block. So
blocks do not depend on how the parameter is split, as long as no block is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge_core.contracts.errors import JobError, Problem
from forge_core.parallel.mesh import local_part
from forge_kit.whole_matrices import own_box

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SMALLEST = 8
"""Elements of a block, at least."""


@frozen
class Blocks:
    """The blocks of a parameter."""

    size: int
    """Elements of a block."""
    rows: int
    """So many rows together are a whole number of blocks."""

    @classmethod
    def of(cls, shape: Sequence[int], size: int) -> Blocks:
        """Those of a parameter (…, rows, columns)."""
        return cls(size, size // math.gcd(size, shape[-1]))

    def shrunk(self, shape: Sequence[int], factor: int) -> tuple[int, ...]:
        """Shape of a tensor (…, rows, columns), or of a part of it, that has one number for `factor` elements of it."""
        *others, rows, columns = shape
        return *others, rows // self.rows, columns * self.rows // factor

    def cuts_none(self, offsets: Sequence[int], sizes: Sequence[int], columns: int) -> bool:
        """Whether a part of a parameter, whose rows have `columns`, consists of whole blocks."""
        if self.rows > 1 and sizes[-1] != columns:
            return False
        unit = self.size if self.rows == 1 else columns
        last = offsets[-1] % unit == 0 and sizes[-1] % unit == 0
        return last and offsets[-2] % self.rows == 0 and sizes[-2] % self.rows == 0


def blocks_of(shape: Sequence[int], size: int) -> Blocks | None:
    """The blocks of a parameter (…, rows, columns); None if it has fewer dimensions, or its rows are no whole number of
    them."""
    if len(shape) < 2 or not math.prod(shape):
        return None
    found = Blocks.of(shape, size)
    return found if shape[-2] % found.rows == 0 else None


def blocks_for(
    name: str, shape: Sequence[int], block_size: int, min_size: int, exclude: Iterable[str]
) -> Blocks | None:
    """The blocks of a parameter whose moments are quantised; None if they are kept in float32."""
    if math.prod(shape) < min_size or any(fnmatchcase(name, glob) for glob in exclude):
        return None
    return blocks_of(shape, block_size)


def check_whole(blocks: Mapping[Tensor, Blocks], names: Mapping[Tensor, str], mesh: DeviceMesh | None) -> None:
    """Each rank must have whole blocks.

    Raises:
        JobError: stages cut some; names the size of blocks that they would leave whole.
    """
    cut = [parameter for parameter, found in blocks.items() if _is_cut(parameter, found, mesh)]
    if not cut:
        return
    name, size = names[cut[0]], blocks[cut[0]].size
    part = f"{list(local_part(cut[0]).shape)} of {name}, {list(cut[0].shape)}"
    more = f", and so with {len(cut) - 1} more" if len(cut) > 1 else ""
    message = f"a rank has {part}, which is not made of whole blocks of {size} elements{more}"
    hint = "add such parameters to optimizer.exclude"
    for smaller in (size >> shift for shift in range(1, size.bit_length()) if size >> shift >= SMALLEST):
        if not any(_is_cut(parameter, Blocks.of(parameter.shape, smaller), mesh) for parameter in cut):
            hint = f"set it to {smaller}, or {hint}"
            break
    raise JobError([Problem("optimizer.block_size", f"{message}; {hint}")])


def _is_cut(parameter: Tensor, blocks: Blocks, mesh: DeviceMesh | None) -> bool:
    box = own_box(parameter, mesh)
    if any(side.start == side.stop for side in box):
        return False
    offsets, sizes = [side.start for side in box], [side.stop - side.start for side in box]
    return not blocks.cuts_none(offsets, sizes, parameter.shape[-1])


def split_like(parameter: Tensor, blocks: Blocks, factor: int, dtype: torch.dtype) -> Tensor:
    """Memory for one number for `factor` elements of a parameter, where the rank has those elements."""
    shape = torch.Size(blocks.shrunk(parameter.shape, factor))
    if not isinstance(parameter, DTensor):
        return torch.empty(shape, dtype=dtype, device=parameter.device)
    own = parameter.to_local()
    memory = torch.empty(blocks.shrunk(own.shape, factor), dtype=dtype, device=own.device)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        memory, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )
