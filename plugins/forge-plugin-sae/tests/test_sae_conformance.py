"""The distribution keeps the contracts of its kinds."""

from __future__ import annotations

from forge_testing.distribution import check_distribution


def test_the_distribution():
    check_distribution("forge-plugin-sae")
