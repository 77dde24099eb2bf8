"""`onednn` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_compile.onednn import OneDNN
from forge_testing.suites import HookSuite


class TestOneDNN(HookSuite):
    component = OneDNN()
