"""`cpu_products` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_compile.products import CPUProducts
from forge_testing.suites import HookSuite


class TestCPUProducts(HookSuite):
    component = CPUProducts()
