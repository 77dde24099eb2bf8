"""The format: against torchao's NF4, against the paper's values, and that a row depends on nothing but itself."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from torch import Tensor

from forge_plugin_lora.nf4 import BLOCK, VALUES, dequantise, pair_table, quantise, stored_bytes


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    """torchao warns when it is imported of each of its kernels for other devices."""
    logging.disable(logging.WARNING)
    try:
        import torchao.quantization  # noqa: F401
    finally:
        logging.disable(logging.NOTSET)


def to_nf4(row: Tensor) -> Tensor:
    """torchao's tensor of a row, whose scales are quantised together; at the place of torchao 0.18, or of 0.17."""
    try:
        from torchao.quantization import to_nf4 as theirs
    except ImportError:
        from torchao.dtypes import to_nf4 as theirs
    return theirs(row, BLOCK, len(row) // BLOCK)


def weights(rows: int = 24, columns: int = 1024, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Rows and blocks of different sizes, and some outliers
    sizes = torch.rand(rows, columns // BLOCK, 1, generator=generator) * 0.05
    values = torch.randn(rows, columns // BLOCK, BLOCK, generator=generator)
    return (values * sizes * (1 + 9 * (values.abs() > 3))).flatten(1)


def stored(weight: Tensor, values: tuple[float, ...] = VALUES, dtype: torch.dtype = torch.float32) -> Tensor:
    pairs = pair_table(values)
    return dequantise(*quantise(weight, pairs), pairs, dtype)


def test_values_are_those_of_torchao():
    """With its sixteen values, which are those of the paper rounded to four decimals."""
    weight = weights()
    theirs = torch.stack([to_nf4(row).get_original_weight() for row in weight])
    rounded = tuple(to_nf4(weight[0]).nf4.tolist())
    assert rounded == pytest.approx(VALUES, abs=5e-5)
    # Means are added up in another order
    torch.testing.assert_close(stored(weight, rounded), theirs, rtol=1e-6, atol=1e-7)
    # A weight half way between two values may go to another one of them once these are rounded
    largest = weight.abs().max()
    closer = (stored(weight) - theirs).abs() < 1e-4 * largest
    assert closer.float().mean() > 0.999
    errors = [float((each - weight).norm() / weight.norm()) for each in (stored(weight), theirs)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


def test_the_values_of_the_paper_divide_a_normal_distribution_into_equal_shares():
    """Section 3 and appendix E: quantiles of N(0, 1) of eight and of nine equal parts on the sides of zero, over the
    largest, whose offset from 1 is the mean of 1/32 and 1/30 from it."""
    offset = 1 - (1 / 32 + 1 / 30) / 2
    quantile = torch.distributions.Normal(0, 1).icdf
    above = quantile(torch.linspace(0.5, offset, 9, dtype=torch.float64))[1:]
    below = -quantile(torch.linspace(0.5, offset, 8, dtype=torch.float64))[1:]
    expected = torch.cat([below, torch.zeros(1, dtype=torch.float64), above]).sort().values / above.max()
    torch.testing.assert_close(torch.tensor(VALUES, dtype=torch.float64), expected, rtol=0, atol=2e-7)


def test_no_weight_moves_further_than_half_the_widest_gap_of_its_block():
    weight = weights()
    blocks = weight.unflatten(-1, (-1, BLOCK))
    moved = (stored(weight).unflatten(-1, (-1, BLOCK)) - blocks).abs().amax(-1)
    scales = blocks.abs().amax(-1)
    # And a scale by half a step, 1/256 of the largest distance from the mean of its row (a whole one at the upper end)
    steps = (scales - scales.mean(-1, keepdim=True)).abs().amax(-1, keepdim=True) / 128
    widest = max(b - a for a, b in itertools.pairwise(VALUES))
    assert (moved <= scales * widest / 2 + steps * 1.001).all()


def test_a_row_is_stored_alike_whatever_rows_are_beside_it():
    weight, pairs = weights(rows=37, columns=320), pair_table()
    packed, rows = quantise(weight, pairs)
    for part in (slice(0, 1), slice(5, 18), slice(36, 37)):
        of_part = quantise(weight[part].clone(), pairs)
        assert torch.equal(of_part[0], packed[part])
        assert torch.equal(of_part[1], rows[part])


def test_bytes_of_some_columns_are_those_columns():
    weight, pairs = weights(), pair_table()
    packed, rows = quantise(weight, pairs)
    half = packed.shape[1] // 2
    both = [dequantise(part, rows, pairs, torch.float32) for part in (packed[:, :half], packed[:, half:])]
    assert torch.equal(torch.cat(both, dim=1), stored(weight))


@pytest.mark.parametrize("columns", [64, 128])
def test_zeros_and_equal_blocks_are_kept(columns):
    weight = torch.zeros(4, columns)
    weight[1] = 0.25
    weight[2, :64] = torch.linspace(-1, 1, 64)
    out = stored(weight)
    assert torch.equal(out[0], weight[0])
    assert torch.equal(out[1], weight[1])
    assert torch.equal(out[2, 64:], weight[2, 64:])
    assert torch.equal(out[3], weight[3])


def test_large_matrices_are_computed_in_parts_to_the_same_bits(monkeypatch):
    weight, pairs = weights(), pair_table()
    packed, rows = quantise(weight, pairs)
    whole = dequantise(packed, rows, pairs, torch.bfloat16)
    monkeypatch.setattr("forge_plugin_lora.nf4.AT_ONCE", 3 * packed.shape[1])
    assert torch.equal(dequantise(packed, rows, pairs, torch.bfloat16), whole)
    stack = dequantise(packed.view(2, 12, -1), rows.view(2, 12, -1), pairs, torch.bfloat16)
    assert torch.equal(stack.view_as(whole), whole)


def test_a_weight_takes_four_bits_and_its_share_of_scales():
    packed, rows = quantise(weights(8, 4096), pair_table())
    assert packed.nbytes + rows.nbytes == stored_bytes((8, 4096))
    assert 8 * stored_bytes((8, 4096)) / (8 * 4096) == 4 + 8 / 64 + 64 / 4096
