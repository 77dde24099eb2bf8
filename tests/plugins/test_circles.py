"""Distributions require each other in one direction."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from workspace import circle, distributions


def test_no_distribution_requires_one_that_requires_it():
    assert circle({each.package: each.requires for each in distributions()}) == []


@pytest.mark.parametrize(
    ("requirements", "names"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b", "c"}, "b": {"c"}}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"d", "b"}}, ["b", "c", "b"]),
        ({"a": {"a"}}, ["a", "a"]),
    ],
)
def test_a_circle_is_found_and_named(requirements, names):
    assert circle(requirements) == names
