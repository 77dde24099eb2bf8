"""The record of all kills so far: a file of JSON that adds up over sessions."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from attrs import asdict

from harness.launch import PLACES
from harness.scenarios import Scenario
from harness.trial import Trial

COUNTS = ("runs", "launches", *PLACES, "alone")


class Record:
    """Totals of each scenario, every failure, and every session that added to them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data: dict[str, Any] = {"scenarios": {}, "failures": [], "sessions": []}
        if path.exists():
            self._data = json.loads(path.read_text())

    @property
    def failures(self) -> list[dict[str, Any]]:
        """What went wrong, with what it takes to look at it: the folder, its job, and the kills in order."""
        return self._data["failures"]

    def begin_session(self, seed: int) -> None:
        """Note when, and on what, the trials that follow are made."""
        versions = {"python": platform.python_version(), "torch": metadata.version("torch")}
        today = time.strftime("%Y-%m-%d %H:%M")
        self._data["sessions"].append({"begun": today, "seed": seed, **versions, "seconds": 0.0, "kills": 0})

    def add(self, trial: Trial, seconds: float) -> None:
        """Count a trial, and write the file. `seconds`: length of the session so far."""
        places = Counter(hit.place for hit in trial.hits)
        alone = sum(hit.kill.victims == "process" for hit in trial.hits)
        totals = self._data["scenarios"].setdefault(trial.scenario.name, dict.fromkeys(COUNTS, 0))
        for name, count in {**places, "runs": 1, "launches": trial.launches, "alone": alone}.items():
            totals[name] += count
        session = self._data["sessions"][-1]
        session["seconds"], session["kills"] = round(seconds, 1), session["kills"] + len(trial.hits)
        if trial.problems:
            self.failures.append(_describe(trial))
        self._write()

    def kills(self, scenario: str | None = None) -> int:
        """How many there were, of one scenario or of all."""
        chosen = self._data["scenarios"] if scenario is None else [scenario]
        return sum(self._count(name, place) for name in chosen for place in PLACES)

    def runs(self, scenario: str) -> int:
        """How many trials a scenario has had."""
        return self._count(scenario, "runs")

    def table(self, scenarios: Iterable[Scenario]) -> str:
        """Totals as a table of Markdown."""
        head = ["scenario", "covers", "runs", "kills", *PLACES, "failures"]
        rows = [self._row(scenario.name, ", ".join(scenario.covers)) for scenario in scenarios]
        sums = [sum(row[column] for row in rows) for column in range(2, len(head))]
        lines = [head, ["---"] * 2 + ["--:"] * (len(head) - 2), *rows, ["all", "", *sums]]
        return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)

    def summary(self) -> str:
        """Everything in one line."""
        counts = self._data["scenarios"].values()
        launches, alone = (sum(count[name] for count in counts) for name in ("launches", "alone"))
        seconds = sum(session["seconds"] for session in self._data["sessions"])
        rate = 60 * self.kills() / seconds if seconds else 0.0
        kills = f"{self.kills()} kills, {alone} of them of the process without its children"
        return f"{kills}; {launches} starts; {rate:.1f} kills a minute"

    def _count(self, scenario: str, what: str) -> int:
        return self._data["scenarios"].get(scenario, {}).get(what, 0)

    def _row(self, name: str, covers: str) -> list[Any]:
        failed = sum(failure["scenario"] == name for failure in self.failures)
        return [name, covers, self.runs(name), self.kills(name), *(self._count(name, p) for p in PLACES), failed]

    def _write(self) -> None:
        unfinished = self._path.with_name(f"{self._path.name}.tmp")
        unfinished.write_text(json.dumps(self._data, indent=1) + "\n")
        os.replace(unfinished, self._path)


def _describe(trial: Trial) -> dict[str, Any]:
    kills = [{**asdict(hit.kill), "place": hit.place} for hit in trial.hits]
    place = {"scenario": trial.scenario.name, "trial": trial.name, "folder": str(trial.folder)}
    return {**place, "problems": trial.problems, "kills": kills, "job": trial.scenario.job}
