"""Health of the machines that train: hooks `gpu`, `links` and `stragglers`, command `doctor gpus`."""

from forge_plugin_resilience.health.gpu import GPU
from forge_plugin_resilience.health.links import Links
from forge_plugin_resilience.health.stragglers import Stragglers

__all__ = ["GPU", "Links", "Stragglers"]
