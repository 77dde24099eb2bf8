"""Rotary position encoding: tables of cosine and sine, and their application."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Fill


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + E/2]) by its angle: (B, S, heads, E) -> the same, in the dtype of x.

    Computed in the tables' precision and rounded once. `sin` is negative in its first half, see `Rotary`.
    """
    wide = x.to(cos.dtype)
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def positions_of(rotary: nn.Module, batch: Batch) -> Tensor | None:
    """Returns the batch's positions for an encoding: its `entry` if the batch has that, else `positions`, else None."""
    own = batch.get(getattr(rotary, "entry", "positions"))
    return batch.get("positions") if own is None else own


def with_tables(rotary: nn.Module, batch: Batch) -> Batch:
    """Returns the batch with tables of its positions, shared by all layers, if the encoding has a `key` for them."""
    key, positions = getattr(rotary, "key", None), positions_of(rotary, batch)
    if key is None or positions is None or key in batch:
        return batch
    return {**batch, key: torch.stack(rotary(positions.shape[1], positions))}


def tables(rotary: nn.Module, length: int, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine of the batch's positions (by default 0, 1, …), from `with_tables` or computed here."""
    key = getattr(rotary, "key", None)
    if key in batch:
        cos, sin = batch[key]
        return cos, sin
    return rotary(length, positions_of(rotary, batch))


class Rotary(nn.Module):
    """Computes the tables that `rotate` applies.

    Angles are computed in float64, so that far positions keep their precision; the tables are float32, or float64 where
    the model computes in it. All layers share the memory of the table of positions 0 to `length` - 1.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, frequencies: Sequence[float], *, amplitude: float, length: int, dtype: torch.dtype) -> None:
        """Set up the tables.

        Args:
            frequencies: radians a position for each of the E / 2 pairs.
            amplitude: factor on both tables.
            length: positions of the cached table; a longer one is computed when needed.
            dtype: the model's compute dtype.
        """
        super().__init__()
        self.frequencies = tuple(frequencies)
        self.amplitude = amplitude
        self.dtype = torch.promote_types(dtype, torch.float32)
        content = repr((self.frequencies, amplitude, self.dtype)).encode()
        self.key = f"rotary {hashlib.blake2b(content, digest_size=8).hexdigest()}"
        shape = (length, 1, 2 * len(self.frequencies))
        self.register_buffer("cos", torch.empty(shape, dtype=self.dtype), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=self.dtype), persistent=False)

    def init_parameter(self, name: str, fill: Fill) -> None:
        raise AssertionError(f"a rotary encoding has no parameter {name}")

    def init_buffers(self, device: torch.device) -> None:
        self.cos, self.sin = _shared_tables(self.frequencies, self.amplitude, len(self.cos), self.dtype, device)

    def forward(self, length: int, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns (cos, sin) of positions 0 to `length` - 1, (length, 1, E), or of `positions` (B, S): (B, S, 1, E)."""
        if positions is not None:
            return _tables(self.angles(positions), self.amplitude, self.dtype)
        if length > len(self.cos):
            self.cos, self.sin = _shared_tables(self.frequencies, self.amplitude, length, self.dtype, self.cos.device)
        return self.cos[:length], self.sin[:length]

    def angles(self, positions: Tensor) -> Tensor:
        """Returns the angle of each pair in radians: (B, S) -> (B, S, 1, E / 2), float64."""
        return positions[..., None, None].to(torch.float64) * self.rates(positions.device)

    def rates(self, device: torch.device) -> Tensor:
        """Returns radians a position for each pair, (E / 2,) float64."""
        return _angle_rates(self.frequencies, device)

    def extra_repr(self) -> str:
        return f"head_dim={2 * len(self.frequencies)}, length={len(self.cos)}"


def _shared_tables(
    frequencies: tuple[float, ...], amplitude: float, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns tables shared by all equal calls; fake tensors (a planned step) are shared within their mode only."""
    mode = getattr(torch.empty(0), "fake_mode", None)
    return _tables_of_range(frequencies, amplitude, length, dtype, device, mode)


@lru_cache(maxsize=4)
def _tables_of_range(
    frequencies: tuple[float, ...],
    amplitude: float,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    _mode: object,  # a part of the key of the cache
) -> tuple[Tensor, Tensor]:
    positions = torch.arange(length, device=device, dtype=torch.float64)
    return _tables(positions[:, None, None] * _angle_rates(frequencies, device), amplitude, dtype)


def _tables(angles: Tensor, amplitude: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns tables of angles (…, 1, E / 2): (…, 1, E); the dimension of size 1 is for the heads."""
    cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def _angle_rates(frequencies: tuple[float, ...], device: torch.device) -> Tensor:
    """Returns (E / 2,) float64; cached, since the host waits when it sends numbers to a GPU."""
    return _sent(frequencies, device, getattr(torch.empty(0), "fake_mode", None))


@lru_cache(maxsize=4)
def _sent(frequencies: tuple[float, ...], device: torch.device, _mode: object) -> Tensor:
    return torch.tensor(frequencies, dtype=torch.float64, device=device)
