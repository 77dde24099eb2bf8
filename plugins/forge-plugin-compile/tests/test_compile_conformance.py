"""`compile` keeps the contracts of its kind."""

from __future__ import annotations

import torch._dynamo.backends.common  # noqa: F401  imported once, and not by each process

from forge_plugin_compile import Compile
from forge_testing.suites import StageSuite


class TestCompile(StageSuite):
    component = Compile(backend="aot_eager")
