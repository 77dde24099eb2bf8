"""Validators of fields that many components have."""

from __future__ import annotations

import pytest
from attrs import field, frozen

from forge_kit.optim import fields
from forge_testing.refusals import naming


@frozen(kw_only=True)
class Settings:
    betas: tuple[float, ...] = field(default=(0.9, 0.95), validator=fields.betas)
    divided: tuple[float, ...] = field(default=(0.9, 0.0), validator=fields.betas_with_positive_first)
    size: int = field(default=8, validator=fields.power_of_two(8))


@pytest.mark.parametrize("right", [{"betas": (0.0, 0.999)}, {"divided": (0.1, 0.0)}, {"size": 256}])
def test_what_is_in_range_is_kept(right):
    [(name, value)] = right.items()
    assert getattr(Settings(**right), name) == value


@pytest.mark.parametrize(
    ("wrong", "facts"),
    [
        ({"betas": (0.9, 1.0)}, ["each", ">= 0", "< 1", "[0.9, 1.0]"]),
        ({"betas": (-0.1, 0.9)}, ["each", ">= 0", "< 1", "[-0.1, 0.9]"]),
        ({"divided": (0.0, 0.9)}, ["first", "> 0", "< 1", "[0.0, 0.9]"]),
        ({"size": 4}, ["power of two", 8, 4]),
        ({"size": 12}, ["power of two", 8, 12]),
    ],
)
def test_what_is_out_of_range_is_refused(wrong, facts):
    with pytest.raises(ValueError, match=naming(*facts)):
        Settings(**wrong)
