"""Runs in trackio: logger `trackio`."""

from forge_plugin_trackio.trackio_component import Trackio

__all__ = ["Trackio"]
