"""`features` keeps the contracts of its kind."""

from __future__ import annotations

from attrs import evolve
from kept_runs import FROZEN, model

from forge_plugin_vision.features import Features
from forge_testing.suites import HookSuite
from forge_testing.vision import RandomImages


class TestFeatures(HookSuite):
    component = Features()
    waits = {"feature_cache.py": 21}  # rows of the cache are looked up and written on the host
    job = {
        "model": model(),
        "plugins": {"freeze": FROZEN},
        "data": {"sources": (RandomImages(sequences=12, held_out=4),)},
        "seq_len": 24,
    }

    def make(self, folder):
        return evolve(self.component, path=str(folder / "features"))
