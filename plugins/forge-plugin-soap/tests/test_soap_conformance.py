"""`soap` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_soap import SOAP
from forge_testing.suites import OptimizerSuite


class TestSOAP(OptimizerSuite):
    component = SOAP(lr=0.02, precondition_frequency=2, adam_lr=1e-2, adam_eps=1e-5)
    layouts = ("replicate2", "pp2")  # others: test_soap.py
