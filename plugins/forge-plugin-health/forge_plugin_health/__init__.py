"""Health of the machines that train: hooks `gpu`, `links` and `stragglers`, command `health`."""

from forge_plugin_health.gpu import GPU
from forge_plugin_health.links import Links
from forge_plugin_health.stragglers import Stragglers

__all__ = ["GPU", "Links", "Stragglers"]
