"""Rotary position encoding: tables of cosine and sine, and their application.

Shapes: B sequences, S positions, E width of a head, R its rotated dimensions (E, or the first of them).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from forge_kit.nn.modules import cast

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Fill


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + R/2]) by its angle: (B, S, heads, E) -> the same, in the dtype of x.

    The tables' width is R; dimensions beyond it pass. Computed in the tables' precision and rounded once. `sin` is
    negative in its first half, see `Rotary`.
    """
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([rotate(x[..., :width], cos, sin), x[..., width:]], -1) if width else x
    wide = cast(x, cos.dtype)
    # Both halves of a pair at once: `roll` exchanges them, and `sin` has their signs
    return cast(torch.addcmul(wide * cos, wide.roll(width // 2, -1), sin), x.dtype)


def positions_of(rotary: nn.Module, batch: Batch) -> Tensor | None:
    """Returns the batch's positions for an encoding: its `entry` if the batch has that, else `positions`, else None."""
    own = batch.get(getattr(rotary, "entry", "positions"))
    return batch.get("positions") if own is None else own


def with_tables(rotary: nn.Module, batch: Batch) -> Batch:
    """Returns the batch with tables of its positions, shared by all layers, if the encoding has a `key` for them."""
    key, positions = getattr(rotary, "key", None), positions_of(rotary, batch)
    if key is None or positions is None or key in batch:
        return batch
    # Both tables in one tensor, as each entry of a batch is a tensor
    return {**batch, key: torch.stack(rotary(positions.shape[1], positions))}


def tables(rotary: nn.Module, length: int, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine of the batch's positions (by default 0, 1, …), from `with_tables` or computed here."""
    key = getattr(rotary, "key", None)
    if key in batch:
        cos, sin = batch[key]
        return cos, sin
    return rotary(length, positions_of(rotary, batch))


def generation_tables(rotary: nn.Module, positions: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine of the newest `positions` (B, S) of rows that are generated with a cache.

    Negative positions are padding. An encoding whose frequencies depend on the length of a sequence (`at_lengths`)
    learns how long each row is by now.
    """
    key = getattr(rotary, "key", None)
    at_lengths: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = getattr(rotary, "at_lengths", None)
    if key in batch and at_lengths is None:
        cos, sin = batch[key].unbind()
        return cos, sin
    own = positions_of(rotary, {**batch, "positions": positions})
    assert own is not None
    return rotary(positions.shape[1], own) if at_lengths is None else at_lengths(own, positions.amax(1) + 1)


def with_generation_tables(rotary: nn.Module, batch: Batch) -> Batch:
    """Returns the batch of the next positions with their tables, shared by all layers, as `with_tables` does."""
    key = getattr(rotary, "key", None)
    # Encodings that go by the length share a key where they agree on the length of training, and no other.
    if key is None or key in batch or "positions" not in batch or getattr(rotary, "at_lengths", None) is not None:
        return batch
    return {**batch, key: torch.stack(generation_tables(rotary, batch["positions"], batch))}


class Rotary(nn.Module):
    """Computes the tables that `rotate` applies.

    Angles are computed in float64, so that far positions keep their precision; the tables are float32, or float64 where
    the model computes in it. All layers share the memory of the table of positions 0 to `length` - 1.
    """

    cos: Tensor
    sin: Tensor
    entry = "positions"
    at_lengths: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """See `RopeComponent`. Here, since a module searches long for an attribute that it does not have."""

    def __init__(self, frequencies: Sequence[float], *, amplitude: float, length: int, dtype: torch.dtype) -> None:
        """Set up the tables.

        Args:
            frequencies: radians a position for each of the R / 2 pairs; none: nothing is rotated.
            amplitude: factor on both tables.
            length: positions of the cached table; a longer one is computed when needed.
            dtype: the model's compute dtype.
        """
        super().__init__()
        self.frequencies = tuple(frequencies)
        self.amplitude = amplitude
        self.dtype = torch.promote_types(dtype, torch.float32)
        # Equal for equal tables, so that layers find the tables of a batch that another layer has made
        content = repr((self.frequencies, amplitude, self.dtype)).encode()
        self.key = f"rotary {hashlib.blake2b(content, digest_size=8).hexdigest()}"
        shape = (length, 1, 2 * len(self.frequencies))
        # In no checkpoint: `init_buffers` computes them from the settings
        self.register_buffer("cos", torch.empty(shape, dtype=self.dtype), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=self.dtype), persistent=False)

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Raises AssertionError, as there are no parameters to fill."""
        raise AssertionError(f"a rotary encoding has no parameter {name}")

    def init_buffers(self, device: torch.device) -> None:
        """Takes the tables that equal encodings of the process share, and makes them the first time."""
        self.cos, self.sin = _shared_tables(self.frequencies, self.amplitude, len(self.cos), self.dtype, device)

    def forward(self, length: int, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns (cos, sin) of positions 0 to `length` - 1, (length, 1, R), or of `positions` (B, S): (B, S, 1, R)."""
        if positions is not None:
            return _tables(self.angles(positions), self.amplitude, self.dtype)
        if length > len(self.cos):
            self.cos, self.sin = _shared_tables(self.frequencies, self.amplitude, length, self.dtype, self.cos.device)
        return self.cos[:length], self.sin[:length]

    def angles(self, positions: Tensor) -> Tensor:
        """Returns the angle of each pair in radians: (B, S) -> (B, S, 1, R / 2), float64."""
        # In float32, the angle of position 100,000 may be off by 0.004
        return positions[..., None, None].to(torch.float64) * self.rates(positions.device)

    def rates(self, device: torch.device) -> Tensor:
        """Returns radians a position for each pair, (R / 2,) float64."""
        return _angle_rates(self.frequencies, device)

    def extra_repr(self) -> str:
        return f"rotated={2 * len(self.frequencies)}, length={len(self.cos)}"


class LengthRotary(Rotary):
    """Base of encodings whose frequencies depend on the length of a sequence.

    A sequence without positions has the length passed to the call, which in training is `train.seq_len`. Given
    positions, of packed documents or of a rank's share of a sequence, do not show its length: the job's length is used.
    In generation each row has its current length.
    """

    cache_limits: Sequence[int] = ()
    """Lengths beyond which a row's cached keys are void, since all its positions are rotated otherwise."""

    def __init__(
        self, frequencies_at: Callable[[int], Sequence[float]], *, amplitude: float, length: int, dtype: torch.dtype
    ) -> None:
        """Set up the tables as `Rotary` does.

        Args:
            frequencies_at: returns the frequencies of a length.
            amplitude: factor on both tables.
            length: the job's sequence length.
            dtype: the model's compute dtype.
        """
        super().__init__(frequencies_at(length), amplitude=amplitude, length=length, dtype=dtype)
        self.frequencies_at, self.length = frequencies_at, length

    def forward(self, length: int, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `Rotary.forward`; without `positions`, the frequencies are the ones for sequences of `length`."""
        # In both cases the frequencies are the ones for the job's length, which the base class has
        if positions is not None or length == self.length:
            return super().forward(length, positions)
        frequencies = tuple(self.frequencies_at(length))
        return _shared_tables(frequencies, self.amplitude, length, self.dtype, self.cos.device)

    def at_lengths(self, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (cos, sin) (B, S, 1, R) of positions (B, S) in rows of `lengths` (B,) positions."""
        rates = self.rates_at(lengths)[:, None, None]
        return _tables(positions[..., None, None].to(torch.float64) * rates, self.amplitude, self.dtype)

    def rates_at(self, lengths: Tensor) -> Tensor:
        """Returns radians a position for each pair in rows of `lengths` (B,): (B, R / 2) float64."""
        raise NotImplementedError


class TwoRangeRotary(LengthRotary):
    """One set of frequencies up to a length, another beyond it."""

    def __init__(
        self,
        frequencies_at: Callable[[int], Sequence[float]],
        *,
        limit: int,
        amplitude: float,
        length: int,
        dtype: torch.dtype,
    ) -> None:
        """As `LengthRotary`; `limit` is the greatest length of the first set."""
        super().__init__(frequencies_at, amplitude=amplitude, length=length, dtype=dtype)
        self.limit, self.cache_limits = limit, (limit,)
        self._short, self._long = (tuple(frequencies_at(longest)) for longest in (limit, limit + 1))

    def rates_at(self, lengths: Tensor) -> Tensor:
        """Chooses the set row by row: a batch may have rows on both sides of `limit`."""
        short, long = (_angle_rates(frequencies, lengths.device) for frequencies in (self._short, self._long))
        return torch.where((lengths > self.limit)[:, None], long, short)


class GrowingBaseRotary(LengthRotary):
    """The base of the wavelengths grows with the length."""

    def __init__(
        self,
        frequencies_at: Callable[[int], Sequence[float]],
        base_at: Callable[[Tensor], Tensor],
        *,
        length: int,
        dtype: torch.dtype,
    ) -> None:
        """As `LengthRotary`; `base_at` returns the bases (B,) of lengths (B,), float64 both."""
        super().__init__(frequencies_at, amplitude=1.0, length=length, dtype=dtype)
        self.base_at = base_at

    def rates_at(self, lengths: Tensor) -> Tensor:
        """Returns base^(-2i / R) for pair i, with the base of each row's length."""
        pairs = len(self.frequencies)
        exponents = torch.arange(pairs, dtype=torch.float64, device=lengths.device) / -pairs
        return self.base_at(lengths.to(torch.float64))[:, None] ** exponents


def _shared_tables(
    frequencies: tuple[float, ...], amplitude: float, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns tables shared by all equal calls; fake tensors (a planned step) are shared within their mode only."""
    mode = getattr(torch.empty(0), "fake_mode", None)
    return _tables_of_range(frequencies, amplitude, length, dtype, device, mode)


# Few are cached: each entry holds two tables of `length` x R numbers as long as the process runs
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
    """Returns tables of angles (…, 1, R / 2): (…, 1, R); the dimension of size 1 is for the heads."""
    cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def _angle_rates(frequencies: tuple[float, ...], device: torch.device) -> Tensor:
    """Returns (R / 2,) float64; cached, since the host waits when it sends numbers to a GPU."""
    return _sent(frequencies, device, getattr(torch.empty(0), "fake_mode", None))


@lru_cache(maxsize=4)
def _sent(frequencies: tuple[float, ...], device: torch.device, _mode: object) -> Tensor:
    return torch.tensor(frequencies, dtype=torch.float64, device=device)
