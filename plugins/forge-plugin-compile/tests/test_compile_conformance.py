"""`compile` keeps the contracts of its kind."""

from __future__ import annotations

from forge_core.testing.suites import StageSuite
from forge_plugin_compile import Compile


class TestCompile(StageSuite):
    component = Compile(backend="aot_eager")
