"""`wandb` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_wandb import Wandb
from forge_testing.distribution import check_distribution
from forge_testing.suites import LoggerSuite


def test_the_distribution():
    check_distribution("forge-plugin-wandb")


class TestWandb(LoggerSuite):
    component = Wandb(mode="offline")
