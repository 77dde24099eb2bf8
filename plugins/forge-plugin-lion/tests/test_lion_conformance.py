"""`lion` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_lion import Lion
from forge_testing.suites import OptimizerSuite


class TestLion(OptimizerSuite):
    component = Lion(lr=3e-3)
    layouts = ("fsdp2",)  # it works element by element


class TestCautiousLion(OptimizerSuite):
    component = Lion(lr=3e-3, cautious=True)
    layouts = ()  # its layouts: test_lion.py
