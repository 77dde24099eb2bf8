"""`lion` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_lion import Lion
from forge_testing.distribution import check_distribution
from forge_testing.suites import OptimizerSuite


def test_the_distribution():
    check_distribution("forge-plugin-lion")


class TestLion(OptimizerSuite):
    component = Lion(lr=3e-3)


class TestCautiousLion(OptimizerSuite):
    component = Lion(lr=3e-3, cautious=True)
    layouts = ("fsdp2",)
