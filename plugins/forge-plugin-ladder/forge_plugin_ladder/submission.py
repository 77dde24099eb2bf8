"""Queues the runs of a ladder on SLURM, as arrays of `forge-run submit`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from forge_core.checkpoint.storage import Local, LocalStorage
from forge_core.contracts.errors import JobError, Problem
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.outputs import mark_output
from forge_plugin_ladder.planned import Planned
from forge_plugin_ladder.runs import RUNS, settle, start_of, trials_of
from forge_plugin_launch.node_paths import load_for
from forge_plugin_launch.slurm import scheduler
from forge_plugin_launch.slurm.queueing import printed_array, queue_array, script_of
from forge_plugin_launch.slurm.records import FOLDER, SUBMISSION, read_json
from forge_plugin_launch.submit import Request
from forge_plugin_runs.compare.comparison import Comparison
from forge_plugin_runs.compare.grid import Trial, check_jobs

if TYPE_CHECKING:
    from forge_plugin_launch.slurm.cluster import SlurmCluster
    from forge_plugin_launch.slurm.script import RunScript


@frozen(kw_only=True)
class Queue:
    """Where and how runs are queued."""

    cluster: SlurmCluster
    problems: Sequence[Problem]
    """Of the cluster's file, to be raised with the jobs' own."""
    at_once: int
    """Runs of an array at the same time; 0: all."""
    print_only: bool
    """Print the scripts, and write and queue nothing."""


def submit(
    runs: Sequence[Planned], base: Path, out: Path, is_branching: bool, queue: Queue, say: Callable[[str], object]
) -> None:
    """Queue the runs that have neither finished nor are queued; branches wait for the jobs of their trunks.

    Raises:
        JobError: a job or the cluster's file is wrong, or SLURM took nothing; nothing is queued of a wrong ladder.
    """
    catalog = Catalog.installed()

    def load(trial: Trial) -> Job:
        # Files that only the nodes have are left to them, as in `forge-run submit`
        return load_for(queue.cluster, [str(trial.cell.job)], trial.overrides, catalog)[0]

    # Checked with the ranks that they will have
    trials, _ = check_jobs(trials_of(runs, base, out, is_branching), queue.cluster.world_size, load)
    comparison = Comparison(out=out)
    # A run that has ended since the last command is neither queued nor waiting
    settle(comparison, trials)
    jobs = {run.name: _queued_as(comparison, trial) for run, trial in zip(runs, trials, strict=True)}
    waiting = {}
    for run, trial in zip(runs, trials, strict=True):
        entry = comparison.record.entries.get(trial.name)
        if jobs[run.name]:
            say(f"{run.name}: queued already, as job {jobs[run.name]}")
        elif entry is None or entry.digest != trial.digest:
            waiting[run.name] = trial
    # Two arrays: a task can only wait for whole jobs, and branches of all trunks wait alike
    branches = [run for run in runs if is_branching and run.trunk and run.name in waiting]
    whole = [run for run in runs if run.name in waiting and run not in branches]
    folders = {run.name: out / RUNS / trial.name for run, trial in zip(runs, trials, strict=True)}
    for run in branches:
        is_coming = run.trunk in waiting or bool(jobs[run.trunk])
        waiting[run.name] = _from_trunk(waiting[run.name], run, folders[run.trunk], is_coming, say)
    # Both are checked before either is queued
    parts = [(part, _checked([waiting[run.name] for run in part], queue)) for part in (whole, branches) if part]
    for part, scripts in parts:
        # The trunks of the first array have jobs by now
        trunks = {run.trunk for run in part if is_branching and run.trunk}
        coming = [name for name in trunks if name in waiting or jobs[name]]
        groups = {"JOB"} if queue.print_only and coming else {_group(folders[name]) for name in coming}
        # A folder of the user's may have data in it, and gets no mark
        if not (queue.print_only or out.exists()):
            out.mkdir(parents=True)
            mark_output(out)
        after = sorted(groups - {""})
        if queue.print_only:
            print(printed_array(scripts, queue.at_once, after), end="")
        else:
            print(*queue_array(scripts, queue.at_once, after), sep="\n")
            _note(comparison, [waiting[run.name] for run in part])
    if not parts:
        say("nothing to queue")


def _from_trunk(trial: Trial, run: Planned, trunk: Path, is_coming: bool, say: Callable[[str], object]) -> Trial:
    """A branch with the checkpoint to start from, which its trunk may still have to save."""
    if is_coming:
        # As a run folder names its checkpoints, wherever its storage keeps them
        return evolve(trial, arguments=("--resume", str(LocalStorage(trunk / Local().folder).path(run.branch_step))))
    return start_of(trial, run, trunk, say)


def _checked(trials: Sequence[Trial], queue: Queue) -> list[RunScript]:
    request = Request(
        groups=[[str(trial.cell.job)] for trial in trials],
        overrides=(),
        cluster=queue.cluster,
        own_overrides=[trial.overrides for trial in trials],
        arguments=[trial.arguments for trial in trials],
    )
    return [script_of(queue.cluster, run) for run in request.check(queue.problems)]


def _note(comparison: Comparison, trials: Sequence[Trial]) -> None:
    """Keep with which job each run was queued."""
    for trial in trials:
        entry = comparison.record.begin(trial)
        # As of a local run that has not finished, so that a later `run` takes it up where SLURM gave up
        entry.digest, entry.failed, entry.ended = "", False, "queued"
        entry.queued, entry.queued_at = trial.digest, time.time()
    comparison.record.write()


def _queued_as(comparison: Comparison, trial: Trial) -> str:
    """The job with which a run is queued or running; empty if it is not."""
    entry = comparison.record.entries.get(trial.name)
    # Another job under the same name is not this one: `Request.check` refuses it while that is queued
    if entry is None or entry.queued != trial.digest or entry.digest:
        return ""
    job = str(read_json(comparison.out / RUNS / trial.name / FOLDER / SUBMISSION).get("job", ""))
    try:
        return job if job and scheduler.queue_state(job) else ""
    except scheduler.SlurmError as error:
        raise JobError(f"whether job {job} of {trial.name} is still queued is not known: {error}") from None


def _group(run: Path) -> str:
    return str(read_json(run / FOLDER / SUBMISSION).get("group", ""))
