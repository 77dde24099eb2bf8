"""Metrics as a table: logger `csv`."""

from forge_plugin_csv.table import Csv

__all__ = ["Csv"]
