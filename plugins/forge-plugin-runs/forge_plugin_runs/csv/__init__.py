"""Metrics as a table: logger `csv`."""

from forge_plugin_runs.csv.table import Csv

__all__ = ["Csv"]
