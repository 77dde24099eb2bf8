"""Stochastic rounding to bfloat16, by random bits that are a function of an element's place in its parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Place = tuple[tuple[int, int, int], ...]
"""Of the elements of a part of a tensor, as nested loops, the outermost first: the first index, how many there are, and
how far apart they lie in the whole, counted row by row. What lies together in the whole is one loop."""

WORD = 0xFFFFFFFF


def place_of(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> Place:
    """Where a part of a tensor of a shape lies in it."""
    loops: list[tuple[int, int, int]] = []
    stride, together = 1, False
    for offset, size, whole in zip(reversed(offsets), reversed(sizes), reversed(shape), strict=True):
        if together:  # all of what is inside this dimension
            _, inner, inner_stride = loops.pop()
            loops.append((offset * inner, size * inner, inner_stride))
        else:
            loops.append((offset, size, stride))
        stride *= whole
        together = size == whole
    return tuple(reversed(loops))


def random_bits(place: Tensor, key: Tensor, count: int) -> Tensor:
    """(count,) int64 of 32 random bits each: those of an element are the same in every division.

    Args:
        place: (loops, 3) int64, a `Place` of `count` elements.
        key: (2,) int64, of 32 bits each. Another key gives other bits.
    """
    left = torch.arange(count, device=key.device)
    number = torch.zeros_like(left)
    for first, inner, stride in place[1:].flip(0).unbind():
        number = number + (left % inner + first) * stride
        left = left // inner
    number = number + (left + place[0, 0]) * place[0, 2]
    return _mix(_mix((number & WORD) ^ key[0]) ^ (number >> 32) ^ key[1])


def _mix(x: Tensor) -> Tensor:
    """A permutation of 32-bit words each of whose output bits depends on all input bits (C. Wellons, "hash-prospector",
    multipliers below 2^31, so that no product overflows)."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & WORD
    x = ((x ^ (x >> 15)) * 0x735A2D97) & WORD
    return x ^ (x >> 15)


def round_with(x: Tensor, bits: Tensor) -> Tensor:
    """float32 to bfloat16: away from zero with the probability of the bits that are cut off, else towards it.

    Args:
        bits: 16 random ones for each element.
    """
    words = x.view(torch.int32)
    rounded = ((words + bits.to(torch.int32)) & -0x10000).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x).bfloat16()
