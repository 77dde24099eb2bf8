"""Stochastic rounding to bfloat16, by random bits that are a function of an element's index in its parameter."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_kit.optim.whole_matrices import own_box
from forge_kit.torch_internals import FakeTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Strides = tuple[tuple[int, int, int], ...]
"""Positions of the elements of a part of a tensor in the whole, as nested loops, the outermost first: first index,
count, and stride in the whole in row-major order. Dimensions that are contiguous in the whole share one loop."""

WORD = 0xFFFFFFFF


class Rounding:
    """Determines the random bits of each update of each parameter.

    They are a function of the seed, the parameter's name, the number of the update, and the element's index, and not
    of ranks, layout or restarts.

    Args:
        names: names of the parameters.
        seed: the run's seed.
        mesh: the mesh over which DTensor parameters are split.
    """

    def __init__(self, names: Mapping[Tensor, str], seed: int = 0, mesh: DeviceMesh | None = None) -> None:
        self._seed = seed
        self._names = dict(names)
        self._places: dict[Tensor, Tensor] = {}
        for parameter in names:
            box = own_box(parameter, mesh)
            offsets, sizes = [side.start for side in box], [side.stop - side.start for side in box]
            place = place_of(offsets, sizes, parameter.shape)
            self._places[parameter] = torch.tensor(place, device=parameter.device)

    def of(self, parameter: Tensor, step: Tensor, purpose: str) -> tuple[Tensor, Tensor]:
        """Returns key and place for `random_bits`. Each `purpose` has different bits."""
        # `step` is on the CPU, so this does not wait for the device
        number = 0 if isinstance(step, FakeTensor) else int(step)
        text = f"{self._seed}:{purpose}:{number}:{self._names[parameter]}"
        # Not `hash`, which Python seeds differently in each process
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        halves = [int.from_bytes(half, "little") for half in (digest[:4], digest[4:])]
        # A tensor, as a kernel would be compiled again for each number
        return torch.tensor(halves).to(parameter.device, non_blocking=True), self._places[parameter]


def place_of(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> Strides:
    """Returns the place of a part in a tensor of `shape`."""
    loops: list[tuple[int, int, int]] = []
    stride, together = 1, False
    for offset, size, whole in zip(reversed(offsets), reversed(sizes), reversed(shape), strict=True):
        if together:  # this dimension is contiguous with the loop inside it
            _, inner, inner_stride = loops.pop()
            loops.append((offset * inner, size * inner, inner_stride))
        else:
            loops.append((offset, size, stride))
        stride *= whole
        together = size == whole
    return tuple(reversed(loops))


def random_bits(place: Tensor, key: Tensor, count: int) -> Tensor:
    """Returns (count,) int64 with 32 random bits each, which for an element are the same under every split.

    Args:
        place: (loops, 3) int64, a `Strides` of `count` elements.
        key: (2,) int64, of 32 bits each. Other keys yield other bits.
        count: number of elements.
    """
    left = torch.arange(count, device=key.device)
    number = torch.zeros_like(left)
    for first, inner, stride in place[1:].flip(0).unbind():
        number = number + (left % inner + first) * stride
        left = left // inner
    number = number + (left + place[0, 0]) * place[0, 2]
    # With the upper half of the index: a stack of experts may have more than 2^32 elements
    return _mix(_mix((number & WORD) ^ key[0]) ^ (number >> 32) ^ key[1])


def _mix(x: Tensor) -> Tensor:
    """Permutes 32-bit words such that each output bit depends on all input bits (C. Wellons, "hash-prospector")."""
    # Multipliers below 2^31, so that no product overflows int64.
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & WORD
    x = ((x ^ (x >> 15)) * 0x735A2D97) & WORD
    return x ^ (x >> 15)


def round_with(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16 stochastically: away from zero with the probability of the bits that are cut off.

    Args:
        x: float32.
        bits: 16 random bits for each element.
    """
    # bfloat16 is the upper half of float32; a carry out of the lower half rounds away from zero
    words = x.view(torch.int32)
    rounded = ((words + bits.to(torch.int32)) & -0x10000).view(torch.float32)
    # The sum of the bits of infinity and others would be NaN
    return torch.where(torch.isfinite(x), rounded, x).bfloat16()
