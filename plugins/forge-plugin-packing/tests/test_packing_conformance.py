"""The distribution is as a plugin's must be."""

from __future__ import annotations

from forge_testing.distribution import check_distribution


def test_the_distribution():
    check_distribution("forge-plugin-packing")
