"""Packings that keep the documents of a sequence apart."""

from forge_plugin_text.packing.best_fit import BestFit
from forge_plugin_text.packing.isolate import Isolate

__all__ = ["BestFit", "Isolate"]
