"""Noise inside a training step that is the same on every layout."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.data import Batch

MANTISSA = 24
"""Random bits of a number: those that a float32 in [0, 1) has."""


def token_noise(batch: Batch, size: int, name: str) -> Tensor:
    """Uniform random numbers for each token, a pure function of values that every layout agrees on.

    `torch.rand` draws from a generator that each data-parallel rank seeds differently and each micro-batch advances, so
    its numbers depend on the layout. These are a hash (SplitMix64) of the sequence's draw (`batch["draw"]`, which the
    engine makes of the job's seed, the step, and the row of the global batch), the token's id and position, the name
    and the column. Outside of a training step there is no draw, so the noise depends on ids and positions alone.

    Args:
        batch: the micro-batch that `forward` received.
        size: numbers for each token.
        name: distinguishes places that draw, such as the layer's number.

    Returns:
        (B, S, size), float32, in [0, 1). Tokens of equal id and position in one sequence, as in two of its documents,
        have equal noise.
    """
    ids = batch["input_ids"]
    positions = batch.get("positions")
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    draw = batch["draw"] if "draw" in batch else ids.new_zeros(len(ids))
    columns = torch.arange(size, device=ids.device)
    # Mixed after each value: plain sums would be equal for other pairs of id and position
    tokens_BS = _mix(_mix(_mix(draw[:, None] ^ _key(name)) + positions) + ids)
    bits_BSN = _mix(tokens_BS[..., None] + columns)
    # As many bits as float32 holds exactly: none of the numbers is rounded up to 1
    return _shifted(bits_BSN, 64 - MANTISSA).float() * 2.0**-MANTISSA


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # dynamo cannot trace hashlib
def _key(name: str) -> int:
    # Signed, as the int64 tensors that it is combined with
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's step and finaliser on int64, whose products wrap around like uint64 products."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant
