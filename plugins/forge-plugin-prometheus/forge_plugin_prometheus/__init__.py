"""Metrics for Prometheus: logger `prometheus`."""

from forge_plugin_prometheus.prometheus import Prometheus

__all__ = ["Prometheus"]
