"""`csv` keeps the contracts of its kind."""

from __future__ import annotations

import csv

from forge_plugin_runs.csv import Csv
from forge_testing.suites import LoggerSuite


class TestCsv(LoggerSuite):
    component = Csv()

    def recorded_steps(self, folder):
        with (folder / "metrics.csv").open(newline="") as file:
            return [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]
