"""Reports on runs: the command `report`, and the sections that every report has."""

from forge_plugin_runs.report.command import write_report

__all__ = ["write_report"]
