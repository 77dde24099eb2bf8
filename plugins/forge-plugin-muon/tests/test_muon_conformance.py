"""`muon` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_muon import Muon
from forge_testing.suites import OptimizerSuite


class TestMuon(OptimizerSuite):
    component = Muon(lr=0.02, adam_lr=1e-2, adam_eps=1e-5)
    layouts = ("replicate2", "pp2")  # others, of four ranks: test_muon.py
