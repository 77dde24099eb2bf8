"""`mup` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_mup import MuP
from forge_testing.suites import HookSuite


class TestMuP(HookSuite):
    component = MuP(parametrization="mup", base={"dim": 8})
    changes_training = True
