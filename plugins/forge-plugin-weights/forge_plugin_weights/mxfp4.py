"""Weights in MXFP4, as in gpt-oss: numbers of 4 bits in blocks of 32 with a power of two each.

The stack `X` is the tensors `X_blocks` (E, R, G, 16), of bytes with two numbers each, the lower half first, and
`X_scales` (E, R, G), of exponents with a bias of 127 (Open Compute Project, Microscaling Formats 1.0: E2M1, E8M0). It
stands for (E, 32 G, R): rows of blocks are columns of the matrices that `transformers` computes with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn import functional

from forge_core.contracts.errors import JobError
from forge_plugin_weights.files import Place

BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of names."""
BYTES = 16
"""Of a block."""
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By their lower three bits; the fourth is the sign."""
BIAS = 127


@frozen
class PackedStack(Place):
    """A stack of 4-bit matrices, which is read as one of `dtype`."""

    as_stored: ClassVar[bool] = False

    blocks: Place = field(kw_only=True)
    scales: Place = field(kw_only=True)

    def read(self) -> Tensor:
        """Returns the stack: each number times the power of two of its block, as `transformers` computes it."""
        numbers = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)], dtype=self.dtype)  # by their four bits
        codes = torch.arange(256)
        pairs = torch.stack([numbers[codes & 0x0F], numbers[codes >> 4]], -1)  # the two numbers of each byte
        wide = torch.empty(self.shape, dtype=self.dtype)
        # A matrix at a time, so that indices, which are larger than the bytes, are needed for one only.
        for own, blocks, scales in zip(wide, self.blocks.read(), self.scales.read(), strict=True):
            values = functional.embedding(blocks.int(), pairs).flatten(-2)  # (R, G, 32)
            values = torch.ldexp(values, scales.int().unsqueeze(-1) - BIAS)
            own.copy_(values.flatten(-2).mT)  # (R, 32 G), transposed
        return wide


def unpacked_places(places: Mapping[str, Place], dtype: torch.dtype) -> dict[str, Place]:
    """Returns the tensors of a folder, with blocks and scales replaced by the stacks they stand for, in `dtype`.

    Raises:
        JobError: blocks have no scales, or they or their scales have other shapes.
    """
    unpacked: dict[str, Place] = {}
    for name, place in places.items():
        if name.endswith(BLOCKS):
            whole = name.removesuffix(BLOCKS)
            scales = _scales_of(name, place, places)
            experts, rows, groups, _ = place.shape
            shape = (experts, groups * 2 * BYTES, rows)
            unpacked[whole] = PackedStack(place.file, place.start, dtype, shape, blocks=place, scales=scales)
        # Scales are read with their blocks; by themselves they would be unknown tensors.
        elif not (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in places):
            unpacked[name] = place
    return unpacked


def _scales_of(name: str, blocks: Place, places: Mapping[str, Place]) -> Place:
    scales = name.removesuffix(BLOCKS) + SCALES
    if scales not in places:
        raise JobError(f"{name} has 4-bit numbers, and there is no {scales} with their scales")
    if len(blocks.shape) != 4 or blocks.shape[3] != BYTES or {blocks.dtype, places[scales].dtype} != {torch.uint8}:
        raise JobError(f"{name} is {blocks.dtype} {list(blocks.shape)}; blocks are bytes, [experts, rows, blocks, 16]")
    if places[scales].shape != blocks.shape[:3]:
        message = f"{scales} has the shape {list(places[scales].shape)}"
        raise JobError(f"{message}; blocks {list(blocks.shape)} have {list(blocks.shape[:3])}")
    return places[scales]
