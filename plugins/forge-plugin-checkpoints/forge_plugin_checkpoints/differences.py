"""Compares the tensors of two checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from forge_kit.tools.checkpoints import stored_tensors
from forge_kit.tools.whole_tensors import Stored, batches, read_whole

AT_A_TIME = 2**30
"""Upper bound of the bytes of each checkpoint in memory at a time."""


@frozen
class Difference:
    """Distance of two tensors of the same name and shape."""

    name: str
    largest: float
    """Largest absolute difference of two elements."""
    relative: float
    """`largest` divided by the largest absolute value in either tensor."""


@frozen(kw_only=True)
class Differences:
    """Differences between the tensors of two checkpoints."""

    only_first: Sequence[str]
    only_second: Sequence[str]
    reshaped: Sequence[str]
    """Tensors of another shape or dtype, with both."""
    changed: Sequence[Difference]
    """Tensors of the same shape and dtype with other values; the largest relative difference first."""
    equal: int
    """Number of bitwise equal tensors."""


def compare_tensors(first: Path, second: Path) -> Differences:
    """Compare all tensors of two checkpoints by name."""
    ones, others = stored_tensors(first), stored_tensors(second)
    common = [name for name in ones if name in others]
    alike = [name for name in common if ones[name] == others[name]]
    differences = list(_differences(first, second, alike, ones, others))
    return Differences(
        only_first=[name for name in ones if name not in others],
        only_second=[name for name in others if name not in ones],
        reshaped=[f"{n}: {_shape(ones, n)} -> {_shape(others, n)}" for n in common if ones[n] != others[n]],
        changed=sorted(differences, key=_greatest_first),
        equal=len(alike) - len(differences),
    )


def _differences(first: Path, second: Path, names: list[str], ones: Stored, others: Stored) -> Iterator[Difference]:
    for batch in batches(names, ones, AT_A_TIME):
        one, other = read_whole(first, batch, ones), read_whole(second, batch, others)
        yield from (
            _difference(name, one[name], other[name]) for name in batch if not torch.equal(one[name], other[name])
        )


def _difference(name: str, one: Tensor, other: Tensor) -> Difference:
    # A difference of bfloat16 numbers would be rounded, one of float16 may overflow
    one, other = one.double(), other.double()
    largest = float((one - other).abs().max())
    # Never by 0: the two differ somewhere
    return Difference(name, largest, largest / max(float(one.abs().max()), float(other.abs().max())))


def _greatest_first(difference: Difference) -> tuple[bool, float]:
    """Sort key: NaN before all numbers."""
    return not math.isnan(difference.relative), -difference.relative


def _shape(stored: Stored, name: str) -> str:
    size, dtype = stored[name]
    return f"{list(size)} {str(dtype).removeprefix('torch.')}"
