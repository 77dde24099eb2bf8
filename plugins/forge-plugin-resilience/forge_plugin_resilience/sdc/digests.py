"""Digests of tensors: exact sums of their bits, which do not depend on the order in which they are made."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from forge_core.parallel.mesh import local_part

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by the bytes of an element."""


@torch.no_grad()
def bit_sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The sum of the bits of each tensor's elements, as integers modulo 2^64; of sharded ones, of this rank's part.

    A flipped bit always changes it. Integers add up exactly, in any order, so no copy need be kept to compare with.
    """
    sums = {name: _bit_sum(local_part(tensor)) for name, tensor in tensors.items()}
    # One transfer from each device, not one for each tensor
    by_device: dict[torch.device, list[str]] = {}
    for name, value in sums.items():
        by_device.setdefault(value.device, []).append(name)
    read: dict[str, int] = {}
    for names in by_device.values():
        read |= zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True)
    return {name: read[name] for name in tensors}


def _bit_sum(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        # No integer is as wide as complex128
        tensor = torch.view_as_real(tensor)
    bits = tensor.detach().contiguous().view(BITS[tensor.element_size()]) if tensor.dtype != torch.bool else tensor
    return bits.sum(dtype=torch.int64)


@torch.no_grad()
def norms(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """The 2-norm of each tensor in float64; of sharded ones, of this rank's part."""
    sums = {name: local_part(tensor).double().norm().cpu() for name, tensor in tensors.items()}
    return {name: float(value) for name, value in sums.items()}


def digest(values: Iterable[object]) -> str:
    """16 hexadecimal digits for many numbers."""
    return hashlib.blake2b(repr(list(values)).encode(), digest_size=8).hexdigest()
