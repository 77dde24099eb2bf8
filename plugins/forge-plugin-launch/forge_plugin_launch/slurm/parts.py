"""Parts of a divided command as the tasks of one array of SLURM, and its join as a job that depends on the array."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve

from forge_core.contracts.errors import JobError
from forge_kit.tools.divided_commands import DividedCommand
from forge_kit.tools.outputs import MARK, mark_output, output_file
from forge_plugin_launch.clusters import State, Status
from forge_plugin_launch.slurm import scheduler
from forge_plugin_launch.slurm.queueing import sbatch, written
from forge_plugin_launch.slurm.records import FOLDER, read_json, write_json
from forge_plugin_launch.slurm.scheduler import SlurmError
from forge_plugin_launch.slurm.script import directives, shared_directives, srun_words

if TYPE_CHECKING:
    from forge_plugin_launch.slurm.cluster import SlurmCluster

PARTS, JOIN = "parts.sh", "join.sh"
"""Scripts in the folder `slurm` of the command's folder."""
JOBS = "jobs.json"
"""Next to them: numbers of the jobs that were queued last, `parts` (empty if none were missing) and `join`."""
AFTER = ("--dependency=afterok:{}", "--kill-on-invalid-dep=yes")
"""Options of sbatch for the join. Without the second, the join of an array that failed would wait for ever."""


def scripts_of(cluster: SlurmCluster, command: DividedCommand) -> dict[str, str]:
    """Returns the text of each script that is to be queued, by its name, in order."""
    texts = {}
    if command.missing:
        own = {"output": _log(command, "%A_%a"), "array": ranges(command.missing)}
        texts[PARTS] = _script(cluster, command, PARTS, own, command.part("$SLURM_ARRAY_TASK_ID"))
    texts[JOIN] = _script(cluster, command, JOIN, {"output": _log(command, "%j")}, command.join)
    return texts


def _script(cluster: SlurmCluster, command: DividedCommand, name: str, own: Mapping[str, object], line: str) -> str:
    # Nodes and GPUs of the cluster file are those of a run; a part is one process on one node
    one = evolve(cluster, nodes=1, gpus_per_node=0, tasks_per_node=1)
    forge_run = shlex.join([*srun_words(one), sys.executable, "-m", "forge_core"])
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {MARK}: of `forge-run {shlex.join(command.words[:2])} --parts`.",
            *directives({"job-name": f"{command.name}-{Path(name).stem}", **own}),
            *shared_directives(one, (), command.work),
            "",
            *one.setup,
            f"exec {forge_run} \\\n  {line}",
            "",
        ]
    )


def ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers as sbatch takes those of an array: `1,4-7`."""
    # Within a run of neighbours, the difference to the position is constant
    runs = (list(group) for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]))
    bounds = ((run[0][1], run[-1][1]) for run in runs)
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in bounds)


def _log(command: DividedCommand, name: str) -> Path:
    return command.folder / FOLDER / f"{name}.log"


def rendered(cluster: SlurmCluster, command: DividedCommand) -> str:
    """Returns the scripts as one text."""
    texts = scripts_of(cluster, command)
    after = f"# queued with {' '.join(AFTER).format('JOB')}, JOB being the array\n" if PARTS in texts else ""
    return "\n".join(f"{after if name == JOIN else ''}{text}" for name, text in texts.items())


def queue(cluster: SlurmCluster, command: DividedCommand) -> Iterator[str]:
    """Queue the parts and the join; yields lines about them.

    Raises:
        JobError: earlier jobs of the command are in the queue, SLURM took nothing, or a script would replace a file of
            the user's.
    """
    _demand_not_queued(command.folder)
    folder = command.folder / FOLDER
    texts = {output_file(folder / name, "--out"): text for name, text in scripts_of(cluster, command).items()}
    is_new = not command.folder.exists()
    jobs = {"parts": "", "join": ""}
    with written([folder], texts):
        # A folder of the user's may have data in it, and gets no mark
        if is_new:
            mark_output(command.folder)
        if command.missing:
            jobs["parts"] = sbatch(folder / PARTS)
            # Before the join is queued: should this process be killed now, the next one still finds the array
            _note(folder, jobs)
        try:
            jobs["join"] = sbatch(folder / JOIN, *(option.format(jobs["parts"]) for option in AFTER if jobs["parts"]))
        # Ctrl-C too
        except BaseException:
            with suppress(SlurmError):
                if jobs["parts"]:
                    scheduler.ask("scancel", jobs["parts"])
            raise
        _note(folder, jobs)
    there = os.path.relpath(command.folder)
    if command.missing:
        count = f"{len(command.missing)} of {command.count} parts"
        yield f"{command.name}: {count} ({ranges(command.missing)}) are the tasks of job {jobs['parts']}"
    yield f"{command.name}: the join is job {jobs['join']}{', after all of them' if jobs['parts'] else ''}"
    yield f"  look at them:  forge-run submit --status {there}"
    yield f"  their logs:    forge-run submit --logs {there}"
    yield f"  end them:      forge-run submit --stop {there}"


def _note(folder: Path, jobs: Mapping[str, str]) -> None:
    write_json(folder / JOBS, {**jobs, "submitted": time.time()})


def _demand_not_queued(folder: Path) -> None:
    jobs = jobs_of(folder)
    try:
        states = {job: scheduler.queue_state(job) for job in jobs.values()}
    except SlurmError as error:
        raise JobError(f"whether jobs {' and '.join(jobs.values())} are still queued is not known: {error}") from None
    if waiting := [f"job {job}: {state}" for job, state in states.items() if state]:
        raise JobError(f"queued already, as {'; '.join(waiting)}; wait, or forge-run submit --stop {folder}")


def jobs_of(folder: Path) -> dict[str, str]:
    """Returns the jobs that were queued last for a command, `parts` and `join`; empty for a folder of something else.

    Args:
        folder: of the command.
    """
    record = read_json(folder / FOLDER / JOBS)
    return {name: str(record[name]) for name in ("parts", "join") if record.get(name)}


def status_of(jobs: Mapping[str, str]) -> Status:
    """Returns what the queue has of the jobs of a command. Facts: `parts` and `join`, in words.

    A job that has left the queue is `unknown`: what is finished shows the same command.
    """
    try:
        states = {name: scheduler.queue_state(job) for name, job in jobs.items()}
    except SlurmError as error:
        raise JobError(f"the states of jobs {' and '.join(jobs.values())} are not known: {error}") from None
    words = {name: f"job {jobs[name]}: {state or 'not in the queue'}" for name, state in states.items()}
    in_queue = [state for state in states.values() if state]
    if not in_queue:
        hint = "not in the queue; the command itself queues what is not finished, and else prints that all is"
        return Status(state="unknown", words=hint, id=" ".join(jobs.values()), facts=words)
    state: State = "running" if any("RUNNING" in each for each in in_queue) else "queued"
    return Status(state=state, words="; ".join(words.values()), id=" ".join(jobs.values()), facts=words)


def print_logs(folder: Path, follow: bool) -> int:
    """Print the logs of the jobs that were queued last, each below its name; returns an exit code."""
    jobs = jobs_of(folder)
    patterns = [f"{job}_*.log" if name == "parts" else f"{job}.log" for name, job in jobs.items()]
    paths = [str(path) for pattern in patterns for path in sorted((folder / FOLDER).glob(pattern))]
    if not paths:
        raise JobError(f"{folder / FOLDER} has no log of jobs {' and '.join(jobs.values())}: none has begun")
    return subprocess.run(["tail", "-v", "-n", "+1", *(["-f"] if follow else []), *paths], check=False).returncode


def stop(folder: Path) -> Iterator[str]:
    """Cancel the jobs that were queued last; yields lines for a person."""
    jobs = [*jobs_of(folder).values()]
    try:
        scheduler.ask("scancel", *jobs)
    except SlurmError as error:
        raise JobError(f"jobs {' and '.join(jobs)} were not cancelled: {error}") from error
    yield f"{folder.name}: jobs {' and '.join(jobs)} are cancelled; the same command continues its parts"
