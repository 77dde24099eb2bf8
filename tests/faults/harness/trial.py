"""One run that is killed and started again until it finishes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random

from attrs import define, field, frozen

from harness.launch import Kill, Launch, Place, committed, draw_kill
from harness.outcome import damaged
from harness.scenarios import Scenario


@frozen
class Hit:
    """A kill, and where it hit."""

    kill: Kill
    place: Place


@define
class Trial:
    """What happened to one run."""

    scenario: Scenario
    name: str
    folder: Path
    hits: list[Hit] = field(factory=list)
    launches: int = 0
    seconds: float = 0.0
    problems: list[str] = field(factory=list)


def plan_kills(seed: str, between: tuple[int, int], life_s: float, ranks: int = 1) -> list[Kill]:
    """The kills of a trial, a function of the seed; so many at least and at most."""
    random = Random(seed)
    return [draw_kill(random, life_s, ranks) for _ in range(random.randint(*between))]


def run_trial(scenario: Scenario, folder: Path, kills: Iterable[Kill], stopping: threading.Event) -> Trial:
    """Run the job in a new folder, killing it as planned, until it finishes or something is wrong.

    Raises:
        Interrupted: `stopping` was set; no process is left.
    """
    scenario.write(folder)
    trial, begin = Trial(scenario, folder.name, folder), time.monotonic()
    for kill in (*kills, None):
        if not _launch(trial, kill, stopping):
            break
    trial.seconds = time.monotonic() - begin
    return trial


def _launch(trial: Trial, kill: Kill | None, stopping: threading.Event) -> bool:
    """Start the process once, and look at what it did; returns whether it has to be started again."""
    trial.launches += 1
    launch = Launch(trial.folder, trial.launches, stopping, trial.scenario.ranks)
    expected = max(committed(launch.run), default=0)
    try:
        killed = launch.finish(kill)
    except TimeoutError as error:
        trial.problems.append(f"launch {trial.launches}: {error}")
        return False
    failure = "" if killed else launch.failure()
    begun = sorted({record["begin"] for record in launch.records() if "begin" in record})
    if kill is not None and killed:
        trial.hits.append(Hit(kill, launch.place(trial.scenario.steps)))
    if begun not in ([], [expected]):
        failure = f"began at step {begun[0]}, though the newest checkpoint is of step {expected}"
    faults = [failure] if failure else damaged(launch.run)
    trial.problems += [f"launch {trial.launches}: {fault}" for fault in faults]
    return killed and not faults
