"""`lion` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_lion import Lion
from forge_testing.suites import OptimizerSuite


class TestLion(OptimizerSuite):
    component = Lion(lr=3e-3)


class TestCautiousLion(OptimizerSuite):
    component = Lion(lr=3e-3, cautious=True)
    layouts = ("fsdp2",)
