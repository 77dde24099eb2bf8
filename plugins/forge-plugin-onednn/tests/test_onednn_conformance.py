"""`onednn` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_onednn import OneDNN
from forge_testing.distribution import check_distribution
from forge_testing.suites import HookSuite


def test_the_distribution():
    check_distribution("forge-plugin-onednn")


class TestOneDNN(HookSuite):
    component = OneDNN()
