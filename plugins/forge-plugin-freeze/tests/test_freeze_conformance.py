"""`freeze` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_freeze import Freeze, Stage
from forge_testing.distribution import check_distribution
from forge_testing.suites import HookSuite


def test_the_distribution():
    check_distribution("forge-plugin-freeze", {"freeze": {"stages": [{"train": ["*"]}]}})


class TestFreeze(HookSuite):
    component = Freeze(stages=(Stage(train=("layers.1.*",), steps=3), Stage()))  # the suite stops after step 3
    changes_training = True
