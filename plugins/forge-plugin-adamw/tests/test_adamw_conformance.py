"""`adamw` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_adamw import AdamW
from forge_testing.suites import OptimizerSuite


class TestAdamW(OptimizerSuite):
    component = AdamW(lr=1e-2, eps=1e-5)
    layouts = ("fsdp2",)  # it works element by element


class TestLoopedAdamW(OptimizerSuite):
    component = AdamW(lr=1e-2, eps=1e-5, fused=False)
    layouts = ("fsdp2",)
