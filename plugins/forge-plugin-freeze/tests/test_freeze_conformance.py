"""`freeze` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_freeze import Freeze, Stage
from forge_testing.suites import HookSuite


class TestFreeze(HookSuite):
    component = Freeze(stages=(Stage(train=("layers.1.*",), steps=3), Stage()))  # the suite stops after step 3
    changes_training = True
    waits = {"audit.py": 3}  # at the stage that begins
