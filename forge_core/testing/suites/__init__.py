"""Behavioural suites, one for each kind: a plugin's tests subclass them. They need pytest."""

from forge_core.testing.suites.loss import LossSuite
from forge_core.testing.suites.optimizer import OptimizerSuite
from forge_core.testing.suites.scheduler import SchedulerSuite

__all__ = ["LossSuite", "OptimizerSuite", "SchedulerSuite"]
