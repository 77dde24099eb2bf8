"""The formats of quantised moments: torchao's, on tensors that a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from attrs import frozen
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torchao.optim import subclass_4bit, subclass_8bit
from torchao.optim.subclass_4bit import OptimState4bit
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.optim.subclass_fp8 import DTYPE, OptimStateFp8


@frozen
class Format:
    """How the elements of a moment are kept."""

    dtype: torch.dtype
    """Of codes."""
    packed: int
    """Elements to a code."""
    wrap: Callable[[Tensor, Tensor, bool, torch.Size], Tensor]
    """(codes, scales, signed, shape) -> torchao's tensor around them: reading it gives numbers, and copying numbers to
    it quantises them. Nothing is copied."""


@cache
def _kept_table(values: Callable[[], tuple[float, ...]], device: torch.device) -> Tensor:
    return torch.tensor(values(), dtype=torch.float32, device=device)


def _table(values: Callable[[], tuple[float, ...]], codes: Tensor) -> Tensor:
    """The value of each code. A fake one belongs to the plan that asked for it, and is not kept."""
    make = _kept_table.__wrapped__ if isinstance(codes, FakeTensor) else _kept_table
    return make(values, codes.device)


def _eight_bit(codes: Tensor, scales: Tensor, signed: bool, shape: torch.Size) -> Tensor:
    values = subclass_8bit.get_qmap_signed if signed else subclass_8bit.get_qmap_unsigned
    return OptimState8bit(codes.view(shape), scales.view(-1), _table(values, codes), signed, torch.float32)


def _four_bit(codes: Tensor, scales: Tensor, signed: bool, shape: torch.Size) -> Tensor:
    values = subclass_4bit.get_qmap_signed if signed else subclass_4bit.get_qmap_unsigned
    return OptimState4bit(codes.view(-1), scales.view(-1), _table(values, codes), signed, shape, torch.float32)


def _float8(codes: Tensor, scales: Tensor, signed: bool, shape: torch.Size) -> Tensor:
    return OptimStateFp8(codes.view(shape), scales.view(-1), torch.float32)


EIGHT_BIT = Format(torch.uint8, 1, _eight_bit)
FOUR_BIT = Format(torch.uint8, 2, _four_bit)
FLOAT8 = Format(DTYPE, 1, _float8)
