"""The distribution keeps the contracts of what it offers."""

from __future__ import annotations

from forge_testing.distribution import check_distribution


def test_the_distribution() -> None:
    check_distribution("forge-plugin-report")
