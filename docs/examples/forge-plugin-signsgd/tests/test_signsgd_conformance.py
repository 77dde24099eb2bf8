"""signSGD keeps the contracts of plugins, and those of optimizers."""

from forge_plugin_signsgd import SignSGD

from forge_testing.distribution import check_distribution
from forge_testing.suites import OptimizerSuite


def test_the_distribution():
    check_distribution("forge-plugin-signsgd")


class TestSignSGD(OptimizerSuite):
    component = SignSGD(lr=3e-3)
