"""Packings that keep the documents of a sequence apart."""

from forge_plugin_packing.best_fit import BestFit
from forge_plugin_packing.isolate import Isolate

__all__ = ["BestFit", "Isolate"]
