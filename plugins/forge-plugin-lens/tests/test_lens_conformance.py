"""The distribution is complete."""

from __future__ import annotations

from forge_testing.distribution import check_distribution


def test_the_distribution():
    check_distribution("forge-plugin-lens")
