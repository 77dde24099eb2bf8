"""The formats of quantised moments, by torchao's functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from attrs import frozen
from torch import Tensor

from forge_kit.torch_internals import FakeTensor, unset_fake_temporarily
from forge_plugin_lowbit.arithmetic import quant_utils, subclass_4bit, subclass_8bit, subclass_fp8

Values = Callable[[], tuple[float, ...]]


@frozen
class Format:
    """Storage format of the elements of a moment.

    Elements are (blocks, size of a block), their codes (blocks, codes of a block), and scales (blocks,): a compiled
    kernel is then specialised for the size of a block, and is valid for any number of blocks.
    """

    dtype: torch.dtype
    """Dtype of codes."""
    packed: int
    """Elements per code."""
    read: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(codes, scales, table) -> the elements in float32."""
    write: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    """(elements, codes, scales, table): write float32 elements into codes and scales."""
    values: tuple[Values, Values]
    """Values of the codes, between -1 and 1: for the average of the gradient, and for the average of its square."""

    def tables(self, codes: Tensor) -> tuple[Tensor, ...]:
        """Returns `values` as tensors on the codes' device."""
        # A fake table belongs to the fake mode that it was made in, so it is not cached.
        make = _table.__wrapped__ if isinstance(codes, FakeTensor) else _table
        return tuple(make(values, codes.device) for values in self.values)


@cache
def _table(values: Values, device: torch.device) -> Tensor:
    with unset_fake_temporarily():  # torchao makes a list of a tensor, which a fake one does not allow
        numbers = values()
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def _read_8(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    return quant_utils.dequant_with_qmap(codes, table, scales)


def _write_8(elements: Tensor, codes: Tensor, scales: Tensor, table: Tensor) -> None:
    scaled, scale = quant_utils.scale_tensor(elements, elements.shape[1])
    codes.copy_(quant_utils.quantize_8bit_with_qmap(scaled, table))
    scales.copy_(scale)


def _read_4(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    # The upper half of a code is the first element of the pair, as torchao packs them
    apart = torch.stack([codes >> 4, codes & 0b1111], dim=-1).flatten(1)
    return quant_utils.dequant_with_qmap(apart, table, scales)


def _write_4(elements: Tensor, codes: Tensor, scales: Tensor, table: Tensor) -> None:
    scaled, scale = quant_utils.scale_tensor(elements, elements.shape[1])
    apart = quant_utils.quantize_4bit_with_qmap(scaled, table)
    # The halves of a code as `_read_4` takes them apart
    codes.copy_((apart[:, ::2] << 4) | apart[:, 1::2])
    scales.copy_(scale)


def _read_float8(codes: Tensor, scales: Tensor, _table: Tensor) -> Tensor:
    return codes.float() * scales.view(-1, 1)


def _write_float8(elements: Tensor, codes: Tensor, scales: Tensor, _table: Tensor) -> None:
    quantised, scale = subclass_fp8.quantize_fp8(elements, elements.shape[1])
    codes.copy_(quantised)
    scales.copy_(scale)


def _none() -> tuple[float, ...]:
    return ()


EIGHT_BIT = Format(torch.uint8, 1, _read_8, _write_8, (subclass_8bit.get_qmap_signed, subclass_8bit.get_qmap_unsigned))
FOUR_BIT = Format(torch.uint8, 2, _read_4, _write_4, (subclass_4bit.get_qmap_signed, subclass_4bit.get_qmap_unsigned))
FLOAT8 = Format(subclass_fp8.DTYPE, 1, _read_float8, _write_float8, (_none, _none))
