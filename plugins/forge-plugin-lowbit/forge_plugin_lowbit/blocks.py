"""Which elements of a parameter share a scale, and how what is kept for each block is split over ranks.

Elements are counted row by row through the whole parameter, as torchao counts them, and every so many are a block. So
blocks do not depend on how the parameter is split, as long as no block is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge_core.errors import JobError, Problem

if TYPE_CHECKING:
    from forge_core.engine.parameters import NamedParameter

SMALLEST = 8
"""Elements of a block, at least."""


@frozen
class Blocks:
    """The blocks of a parameter."""

    size: int
    """Elements of a block."""
    rows: int
    """So many rows together are a whole number of blocks."""

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
    """The blocks of a parameter (…, rows, columns); None if it has fewer dimensions, or its elements are no whole number
    of blocks."""
    if len(shape) < 2 or not math.prod(shape):
        return None
    rows = size // math.gcd(size, shape[-1])
    return Blocks(size, rows) if shape[-2] % rows == 0 else None


def check_whole(item: NamedParameter, blocks: Blocks) -> None:
    """Stages must leave each rank whole blocks.

    Raises:
        JobError: they do not; says which size of blocks they would leave whole.
    """
    parameter: DTensor = item.parameter  # type: ignore[assignment]
    if not isinstance(parameter, DTensor) or not parameter.to_local().numel():
        return
    for chunk in parameter.__create_chunk_list__():  # type: ignore[attr-defined]
        if not blocks.cuts_none(chunk.offsets, chunk.sizes, parameter.shape[-1]):
            part = f"{list(chunk.sizes)} at {list(chunk.offsets)} of {item.name}, {list(parameter.shape)}"
            seen = f"a rank has {part}, which is not made of whole blocks of {blocks.size} elements"
            raise JobError([Problem("optimizer.block_size", f"{seen}; {_fix(parameter, blocks, chunk)}")])


def _fix(parameter: Tensor, blocks: Blocks, chunk: object) -> str:
    size = blocks.size // 2
    exclude = "add the parameter to optimizer.exclude"
    while size >= SMALLEST:
        smaller = blocks_of(parameter.shape, size)
        if smaller and smaller.cuts_none(chunk.offsets, chunk.sizes, parameter.shape[-1]):  # type: ignore[attr-defined]
            return f"set it to {size}, or {exclude}"
        size //= 2
    return exclude


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
