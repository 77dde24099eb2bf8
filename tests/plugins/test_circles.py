"""Distributions require each other in one direction."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from workspace import circle, distributions


def test_no_distribution_requires_one_that_requires_it():
    assert circle({each.package: each.requires for each in distributions()}) == []


def test_whoever_can_train_has_the_launcher():
    """`--nproc` is a command of forge-kit, which no user should have to install for it."""
    requires = {each.package: each.requires for each in distributions()}

    def all_of(package: str) -> set[str]:
        return {package}.union(*(all_of(each) for each in requires.get(package, ())))

    needed = {"model", "optimizer", "dataset"}  # of which every job has one, and the core none
    offering = {each.package: needed.intersection(kind for kind, _ in each.offers) for each in distributions()}
    assert set().union(*offering.values()) == needed
    assert [package for package, kinds in offering.items() if kinds and "forge_kit" not in all_of(package)] == []


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
