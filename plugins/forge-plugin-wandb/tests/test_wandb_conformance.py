"""`wandb` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_wandb import Wandb
from forge_testing.suites import LoggerSuite


class TestWandb(LoggerSuite):
    component = Wandb(mode="offline")
