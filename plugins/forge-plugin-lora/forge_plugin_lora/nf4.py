"""NF4, a format of four bits a weight (QLoRA, Dettmers et al. 2023, section 3 and appendix E).

64 weights of a row are a block. A block has a scale, the largest magnitude in it, and each weight over that is rounded
to the nearest of sixteen values, the quantiles of a normal distribution. The scales of a row are quantised in turn, to
eight bits around their mean ("double quantisation", here as torchao computes it), with the mean and a factor in float32
for each row: 4 + 8/64 + 64/in bits for a weight. In the paper, 256 blocks share a factor, and all blocks the mean. By
rows, a weight depends on its row alone, so that ranks which hold different rows compute the same values.

Shapes: (…, out, in) weights; (…, out, N x 33) bytes of N = in/64 blocks, 32 with two weights each and the scale;
(…, out, 8) bytes of the factor and the mean of each row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from forge_kit.nn.modules import cast

VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The sixteen values, of appendix E of the paper."""
BLOCK = 64
"""Weights with one scale."""
BYTES = BLOCK // 2 + 1
"""Bytes of a block."""
ROW_BYTES = 8
"""Bytes that a row has in addition."""
AT_ONCE = 1 << 22
"""Bytes from which weights are computed at a time, in about 20 times as much memory."""


def pair_table(values: tuple[float, ...] = VALUES) -> Tensor:
    """Returns the two values that each byte stands for, (256, 2); the first by its upper four bits."""
    each = torch.tensor(values)
    return torch.stack([each.repeat_interleave(16), each.repeat(16)], dim=-1)


def quantise(weight: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Store whole rows.

    Each row is computed by operations on single elements and in a fixed order, so that its bytes depend neither on the
    number of rows nor on the ranks that hold them.

    Args:
        weight: (…, out, in) float32, of which `in` is a multiple of `BLOCK`.
        pairs: of `pair_table`.

    Returns:
        The bytes of blocks and of rows.
    """
    blocks = weight.unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    mean = _sums(scales) / scales.shape[-1]
    apart = scales - mean
    furthest = apart.abs().amax(-1, keepdim=True)
    # Equal scales, such as a single one, are their mean
    factor = torch.where(furthest > 0, 128 / furthest, 1.0)
    # The scale furthest above the mean becomes 128, one more than int8 holds
    in_eight = (apart * factor).round().clamp(-128, 127).to(torch.int8)
    # A block of zeros has no scale to divide by; zero is one of the values
    scaled = blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    values = cast(pairs[:16, 1].contiguous(), torch.float32)
    # The nearest value changes half way between two: no table of (…, 64, 16) distances is needed
    nearest = torch.bucketize(scaled, (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8)
    in_four = nearest[..., ::2] << 4 | nearest[..., 1::2]
    packed = torch.cat([in_four, in_eight.unsqueeze(-1).view(torch.uint8)], dim=-1)
    return packed.flatten(-2), torch.cat([factor, mean], dim=-1).view(torch.uint8)


def _sums(rows: Tensor) -> Tensor:
    """(…, N) to (…, 1): sums of halves of halves, whose order is the same on all devices and for all shapes."""
    size = 1 << (rows.shape[-1] - 1).bit_length()
    rows = F.pad(rows, (0, size - rows.shape[-1]))
    while size > 1:
        size //= 2
        rows = rows[..., :size] + rows[..., size:]
    return rows


def dequantise(packed: Tensor, rows: Tensor, pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the weights that bytes stand for, computed in float32.

    Args:
        packed: bytes of blocks, all of a row's or some.
        rows: bytes of their rows.
        pairs: of `pair_table`.
        dtype: of the result.
    """
    # Compiled, it is one kernel
    if packed.numel() <= AT_ONCE or torch.compiler.is_compiling():
        return _dequantise(packed, rows, pairs).to(dtype)
    out = packed.new_empty((*packed.shape[:-1], packed.shape[-1] // BYTES * BLOCK), dtype=dtype)
    parts = (tensor.flatten(0, -2).split(rows_at_once(packed.shape[-1])) for tensor in (out, packed, rows))
    for into, of_packed, of_rows in zip(*parts, strict=True):
        into.copy_(_dequantise(of_packed, of_rows, pairs))
    return out


def _dequantise(packed: Tensor, rows: Tensor, pairs: Tensor) -> Tensor:
    blocks = packed.unflatten(-1, (-1, BYTES))
    # (…, out, 1, 1) each
    factor, mean = rows.view(torch.float32).unsqueeze(-2).chunk(2, dim=-1)
    scales = blocks[..., BLOCK // 2 :].view(torch.int8) / factor + mean
    # The table is in float64 in a model that is
    values = F.embedding(blocks[..., : BLOCK // 2].int(), cast(pairs, torch.float32))
    return (values.flatten(-2) * scales).flatten(-2)


def rows_at_once(size: int) -> int:
    """Returns how many rows of so many bytes are computed together."""
    return max(1, AT_ONCE // size)


def stored_bytes(shape: tuple[int, ...] | torch.Size) -> int:
    """Returns the bytes of a weight (…, out, in)."""
    *others, inputs = shape
    rows = 1
    for size in others:
        rows *= size
    return rows * (inputs // BLOCK * BYTES + ROW_BYTES)
