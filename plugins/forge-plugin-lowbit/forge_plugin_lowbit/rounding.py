"""Stochastic rounding to bfloat16, by random bits that are a function of an element's place in its parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Place = tuple[tuple[int, int], ...]
"""Of a part of a tensor, along each dimension: its first index there, and how far apart neighbours lie in the whole, row by
row."""

WORD = 0xFFFFFFFF


def place_of_part(parameter: Tensor) -> Place:
    """Where this rank's part of a parameter lies in the whole."""
    offsets: Sequence[int] = [0] * parameter.ndim
    if hasattr(parameter, "to_local") and parameter.to_local().numel():
        (chunk,) = parameter.__create_chunk_list__()  # type: ignore[attr-defined]
        offsets = chunk.offsets
    strides = torch.empty(parameter.shape, device="meta").stride()
    return tuple(zip(offsets, strides, strict=True))


def random_bits(shape: Sequence[int], place: Place, key: Tensor) -> Tensor:
    """32 bits for each element of a part of a tensor, in int64: equal under every division into parts.

    Args:
        key: (2,) int64, of 32 bits each. Another key gives other bits.
    """
    number: Tensor = torch.zeros((), dtype=torch.int64, device=key.device)
    for size, (offset, stride) in zip(shape, place, strict=True):
        along = torch.arange(offset, offset + size, device=key.device) * stride
        number = number.unsqueeze(-1) + along
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
