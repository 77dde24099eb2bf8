"""A comparison in its folder: trains the missing runs, by rungs or a search if requested, and writes the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import define, field

from forge_core.contracts.errors import ExitCode, ForgeError, JobError
from forge_core.job import Job
from forge_kit.tools.outputs import mark_output
from forge_plugin_runs.compare.grid import SEED, Cell, Trial, check_jobs, existing, label_of, read_space, trial_of
from forge_plugin_runs.compare.halving import kept, rungs_of
from forge_plugin_runs.compare.processes import Finished, Processes, succeeded
from forge_plugin_runs.compare.record import Record
from forge_plugin_runs.compare.results import Outcome, read_outcome
from forge_plugin_runs.compare.search import Search


@define(kw_only=True)
class Comparison:
    """The runs of a folder, and how they are trained."""

    out: Path
    ranks: int = 1
    parallel: int = 1
    halving: bool = False
    say: Callable[[str], object] = print
    """Receives a line for each run that ends."""
    record: Record = field(init=False)
    asked: set[str] = field(factory=set, init=False)
    """Names of the runs that this command is about; earlier ones may have left others in the folder."""
    _begun: float = field(factory=time.monotonic, init=False)

    def __attrs_post_init__(self) -> None:
        self.record = Record(self.out)

    @property
    def logs(self) -> Path:
        """Folder with the log of each run."""
        return self.out / "logs"

    def train(self, trials: Sequence[Trial]) -> bool:
        """Train all runs; returns False if that was interrupted.

        Raises:
            JobError: a job is wrong, or `halving` does not go with them. Nothing was started then.
        """
        # All jobs first: a mistake in the last one would otherwise show after hours
        trials, jobs = check_jobs(trials, self.ranks)
        rungs = rungs_of(len(_cells(trials)), jobs) if self.halving else []
        return self._run(trials, rungs, self._processes(jobs))

    def search(self, job: Path, settings: Sequence[str], overrides: Sequence[str], count: int) -> bool:
        """Train `count` runs, whose values are chosen by results; returns False if that was interrupted.

        Raises:
            JobError: a setting cannot be read, or a job is wrong.
            ForgeError: Optuna is not installed.
        """
        space = read_space(settings)
        if SEED in space:
            raise JobError(f"--set {SEED}: a search would take the luckiest seed for the best; leave it out")
        search, tried = Search(space), 0
        # Results of earlier commands count, so that the same command continues the search
        for name, entry in self.record.entries.items():
            if entry.job == str(job) and set(entry.settings) == set(space) and (entry.digest or entry.failed):
                search.tell(entry.settings, _score(self._outcome(name)))
                tried += 1
        while tried < count:
            # No more than run at the same time, so that later proposals use their results
            asked = search.ask(min(self.parallel, count - tried))
            cells = [Cell(job=job, settings=values, label=label_of("", values)) for values in asked]
            trials = [trial_of(cell, "", overrides, self.out / "runs") for cell in cells]
            # By name, as a search may propose the same values twice
            if not self.train(list({trial.name: trial for trial in trials}.values())):
                return False
            for trial in trials:
                search.tell(trial.cell.settings, _score(self._outcome(trial.name)))
            tried += len(trials)
        return True

    def outcomes(self, runs: Sequence[Path] = ()) -> list[Outcome]:
        """Returns the results of all runs of the folder, including runs of earlier commands, and of further `runs`."""
        folder = self.out / "runs"
        older = [path for path in sorted(folder.glob("*/")) if path.name not in self.record.entries]
        found = [self._outcome(name) for name in self.record.entries]
        return found + [read_outcome(trial, trial.cell.job) for trial in existing([*older, *runs])]

    def _outcome(self, name: str) -> Outcome:
        entry = self.record.entries[name]
        return read_outcome(entry.trial(name), self.out / "runs" / name, entry)

    def _processes(self, jobs: Sequence[Job]) -> Processes:
        gpus = 0
        # torch takes seconds to import, and is needed only to divide GPUs among runs
        if self.parallel > 1 and any(job.train.device != "cpu" for job in jobs):
            import torch

            gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if gpus and gpus < self.parallel * self.ranks:
                needed = f"--parallel {self.parallel} needs {self.parallel * self.ranks} GPUs, and there are {gpus}"
                raise JobError(f"{needed}; lower it, or train on the CPU (--train.device=cpu)")
        # From earlier commands too, as a run that has just started does not show yet how much it needs
        largest = max((entry.peak_memory for entry in self.record.entries.values()), default=0)
        if not self.out.exists():  # in a folder of the user's there may be data
            self.out.mkdir(parents=True)
            mark_output(self.out)
        self.logs.mkdir(parents=True, exist_ok=True)
        return Processes(logs=self.logs, ranks=self.ranks, parallel=self.parallel, gpus=gpus, largest=largest)

    def _run(self, trials: Sequence[Trial], rungs: Sequence[int], processes: Processes) -> bool:
        self.asked |= {trial.name for trial in trials}
        for trial in trials:
            entry = self.record.begin(trial)
            if entry.digest != trial.digest:  # new, not finished, or another job by now
                entry.digest, entry.failed, entry.ended = "", False, "interrupted"
        self.record.write()
        alive, number = list(trials), 0
        # 0 stands for the end of the runs
        for rung in [*rungs, 0]:
            waiting = [trial for trial in alive if not self._has_reached(trial, rung)]

            def note(finished: Finished, rung: int = rung, count: int = len(waiting)) -> None:
                nonlocal number
                number += 1
                self._note(finished, rung, f"{number}/{count}")

            number = 0
            if not processes.run(waiting, rung, note):
                return False
            alive = [trial for trial in alive if not self.record.entries[trial.name].failed]
            alive = self._better_half(alive, rung) if rung else alive
        return True

    def _has_reached(self, trial: Trial, rung: int) -> bool:
        entry = self.record.entries[trial.name]
        # A run that was interrupted behind the rung has its evaluation in the metrics, and need not start for it
        return bool(entry.digest) or (rung > 0 and rung in self._outcome(trial.name).evaluations)

    def _note(self, finished: Finished, rung: int, place: str) -> None:
        entry = self.record.entries[finished.trial.name]
        entry.cpu_seconds += finished.cpu_seconds
        entry.peak_memory = max(entry.peak_memory, finished.peak_memory)
        entry.failed = not succeeded(finished.code)
        # A run that was stopped at a rung has exit code 75: neither finished nor failed
        entry.ended = f"exit code {finished.code}" if entry.failed else "interrupted"
        if finished.code == ExitCode.FINISHED:
            entry.digest, entry.ended = finished.trial.digest, ""
        self.record.write()
        outcome = self._outcome(finished.trial.name)
        held_out = f"  held out {outcome.held_out:.4f}" if outcome.evaluations else ""
        result = entry.ended if entry.failed else f"loss {outcome.loss:.4f}{held_out}"
        seed = f", seed {finished.trial.seed}" if finished.trial.seed else ""
        where = f"  step {rung}" if rung and not entry.failed else ""
        self.say(f"{place}  {entry.label}{seed}{where}  {result}  {time.monotonic() - self._begun:.0f} s")

    def _better_half(self, trials: Sequence[Trial], rung: int) -> list[Trial]:
        """Returns the runs of the cells that continue after a rung; records for the other runs why they ended."""
        scores: dict[int, float] = {}
        cells = _cells(trials)
        for number, own in enumerate(cells):
            losses = [self._outcome(trial.name).evaluations.get(rung) for trial in own]
            # A run whose evaluations are at other steps cannot be compared
            if None in losses:
                raise ForgeError(f"{own[0].name} has no held-out loss (eval/loss) at step {rung}; --halving needs it")
            scores[number] = sum(loss for loss in losses if loss is not None) / len(losses)
        # NaN is larger than any loss: a run that diverged never stays for one that did not
        order = sorted(scores, key=lambda number: (scores[number] != scores[number], scores[number]))
        staying = order[: kept(len(order))]
        for number in order[len(staying) :]:
            for trial in cells[number]:
                entry = self.record.entries[trial.name]
                if not entry.digest:
                    entry.ended = f"stopped at step {rung}, behind the better half"
        self.record.write()
        return [trial for number in staying for trial in cells[number]]


def _cells(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Runs by cell, in order."""
    cells: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        cells.setdefault((str(trial.cell.job), trial.cell.label), []).append(trial)
    return list(cells.values())


def _score(outcome: Outcome) -> float:
    """What a search minimises: the held-out loss, or the training loss where there is none; of a failure, NaN."""
    if outcome.failed:
        return float("nan")
    return outcome.held_out if outcome.evaluations else outcome.mean_loss
