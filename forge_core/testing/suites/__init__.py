"""Behavioural suites, one for each kind: a plugin's tests subclass them. They need pytest."""

from forge_core.testing.suites.optimizer import OptimizerSuite

__all__ = ["OptimizerSuite"]
