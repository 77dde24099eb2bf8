"""Behavioural suites, one for each kind: a plugin's tests subclass them. They need pytest."""

from forge_testing.suites.dataset import DatasetSuite
from forge_testing.suites.hook import HookSuite
from forge_testing.suites.logger import LoggerSuite
from forge_testing.suites.loss import LossSuite
from forge_testing.suites.model import ModelSuite
from forge_testing.suites.optimizer import OptimizerSuite
from forge_testing.suites.router import RouterSuite
from forge_testing.suites.scheduler import SchedulerSuite
from forge_testing.suites.stage import StageSuite

__all__ = [
    "DatasetSuite",
    "HookSuite",
    "LoggerSuite",
    "LossSuite",
    "ModelSuite",
    "OptimizerSuite",
    "RouterSuite",
    "SchedulerSuite",
    "StageSuite",
]
