"""Many trials, several at a time, until there were enough kills."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from attrs import frozen

from harness.launch import RUN
from harness.outcome import differences, irregular, read_outcome
from harness.record import Record
from harness.scenarios import Scenario
from harness.trial import Trial, plan_kills, run_trial


class ReferenceFailed(Exception):
    """A run that nobody killed went wrong."""


@frozen
class Reference:
    """A run that nobody killed."""

    outcome: dict[str, Any]
    seconds: float


class Campaign:
    """Trials in a folder of their own. Those that fail stay there."""

    def __init__(
        self,
        scenarios: Sequence[Scenario],
        record: Record,
        folder: Path,
        seed: int,
        echo: Callable[[str], object],
        kills_per_run: tuple[int, int] = (4, 8),
    ) -> None:
        """Args: `kills_per_run`, how many are planned at least and at most; a run that finishes first is spared the
        rest."""
        self._scenarios = scenarios
        self._record = record
        self._folder = folder
        self._seed = seed
        self._echo = echo
        self._kills_per_run = kills_per_run
        self._stopping = threading.Event()
        self._references: dict[str, Reference] = {}
        self._begun: dict[str, int] = {}

    def run(self, kills: int, jobs: int) -> None:
        """Go on until the record has so many kills. An interrupt leaves out the trials in progress.

        Raises:
            ReferenceFailed: an uninterrupted run failed.
        """
        if self._record.kills() >= kills:
            return
        self._record.begin_session(self._seed)
        begin = time.monotonic()
        with ThreadPoolExecutor(jobs) as pool:
            try:
                self._make_references(pool)
                running: dict[Future[Trial], int] = {}
                while True:
                    while len(running) < jobs and self._record.kills() + sum(running.values()) < kills:
                        running |= self._submit(pool)
                    if not running:
                        break
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        del running[future]
                        self._judge(future.result(), time.monotonic() - begin)
            except BaseException:
                self._stopping.set()
                raise

    def _make_references(self, pool: ThreadPoolExecutor) -> None:
        shutil.rmtree(self._folder / "reference", ignore_errors=True)
        made = pool.map(self._run_reference, self._scenarios)
        for scenario, trial in zip(self._scenarios, made, strict=True):
            outcome = {} if trial.problems else read_outcome(trial.folder / RUN)
            problems = trial.problems or irregular(outcome["metrics"], scenario.steps)
            if problems:
                raise ReferenceFailed(f"{trial.folder}: {'; '.join(problems)}")
            self._references[scenario.name] = Reference(outcome, trial.seconds)

    def _run_reference(self, scenario: Scenario) -> Trial:
        return run_trial(scenario, self._folder / "reference" / scenario.name, [], self._stopping)

    def _submit(self, pool: ThreadPoolExecutor) -> dict[Future[Trial], int]:
        """Start a trial of the scenario that has had the fewest kills; returns it with the kills that are planned."""
        scenario = min(self._scenarios, key=lambda known: (self._record.kills(known.name), self._number(known)))
        number = self._number(scenario)
        self._begun[scenario.name] = number + 1
        name = f"{scenario.name}-{self._seed}-{number}"
        shutil.rmtree(self._folder / name, ignore_errors=True)  # of a session that was interrupted
        kills = plan_kills(name, self._kills_per_run, self._references[scenario.name].seconds, scenario.ranks)
        return {pool.submit(run_trial, scenario, self._folder / name, kills, self._stopping): len(kills)}

    def _number(self, scenario: Scenario) -> int:
        return self._begun.get(scenario.name, self._record.runs(scenario.name))

    def _judge(self, trial: Trial, seconds: float) -> None:
        """Compare with the reference, count, and clear away what is as it should be."""
        if not trial.problems:
            expected = self._references[trial.scenario.name].outcome
            trial.problems = differences(expected, read_outcome(trial.folder / RUN))
        self._record.add(trial, seconds)
        if not trial.problems:
            shutil.rmtree(trial.folder)
        self._echo(self._describe(trial))

    def _describe(self, trial: Trial) -> str:
        places = ", ".join(hit.place for hit in trial.hits) or "none"
        line = f"{self._record.kills():5} kills  {trial.name}: {places}"
        problems = "".join(f"\n    {problem}" for problem in trial.problems[:5])
        return f"{line}\n  FAILED, see {trial.folder}{problems}" if problems else line
