"""Queues runs in SLURM: writes their scripts and hands them to sbatch."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from forge_core.checkpoint.run_folder import run_folder
from forge_core.contracts.errors import JobError, Problem
from forge_core.job import Job
from forge_kit.tools.outputs import output_file
from forge_kit.tools.run_owner import owner
from forge_plugin_launch.clusters import SubmittedRun
from forge_plugin_launch.slurm import scheduler
from forge_plugin_launch.slurm.hook import Slurm
from forge_plugin_launch.slurm.records import (
    FOLDER,
    SCRIPT,
    SUBMISSION,
    excluded_nodes,
    read_attempts,
    read_json,
    write_json,
)
from forge_plugin_launch.slurm.scheduler import SlurmError
from forge_plugin_launch.slurm.script import RunScript, array_text

if TYPE_CHECKING:
    from forge_plugin_launch.slurm.cluster import SlurmCluster


def script_of(cluster: SlurmCluster, run: SubmittedRun) -> RunScript:
    """Returns the batch script of a run, without the nodes that failed twice in it."""
    return RunScript(
        name=run.name,
        run=run.folder,
        work=run.work,
        words=run.words,
        cluster=cluster,
        excluded=tuple(excluded_nodes(read_attempts(run.folder))),
    )


def queue(script: RunScript) -> list[str]:
    """Queue one run; returns lines about it."""
    with written([script.run / FOLDER], _texts([script])):
        job = sbatch(script.run / SCRIPT)
        note(script.run, job, job, str(script.run / FOLDER / f"{job}.log"))
    return [*_announcement(script, job)]


def printed_array(scripts: Sequence[RunScript], at_once: int, after: Sequence[str] = ()) -> str:
    """Returns the scripts of an array and of its runs."""
    text = array_text(scripts, at_once, _array_log(scripts), after)
    return "\n".join([text, *(f"# {script.run / SCRIPT}\n{script.text()}" for script in scripts)])


def queue_array(scripts: Sequence[RunScript], at_once: int, after: Sequence[str] = ()) -> list[str]:
    """Queue runs as the tasks of one array.

    Args:
        scripts: of the runs.
        at_once: tasks at the same time; 0: all.
        after: jobs that must have ended before, in whichever way.

    Returns:
        Lines about the runs.
    """
    first, output = scripts[0], _array_log(scripts)
    path, text = first.run.parent / f"{first.name}-array.sh", array_text(scripts, at_once, output, after)
    with written([script.run / FOLDER for script in scripts], {**_texts(scripts), output_file(path, "--array"): text}):
        job = sbatch(path)
        for number, script in enumerate(scripts):
            note(script.run, f"{job}_{number}", job, str(output).replace("%A", job).replace("%a", str(number)))
    return [line for number, script in enumerate(scripts) for line in _announcement(script, f"{job}_{number}")]


def _array_log(scripts: Sequence[RunScript]) -> Path:
    return scripts[0].run.parent / "slurm-%A_%a.log"


def _announcement(script: RunScript, job: str) -> Iterator[str]:
    run, cluster = os.path.relpath(script.run), script.cluster
    size, nodes = cluster.world_size, cluster.nodes
    ranks = f"{size} rank{'s' if size > 1 else ''} on {nodes} node{'s' if nodes > 1 else ''}"
    yield f"{script.name}: job {job}, {ranks}"
    if script.excluded:
        yield f"  left out, having failed twice in this run: {', '.join(script.excluded)}"
    yield f"  look at it:  forge-run submit --status {run}"
    yield f"  its log:     {os.path.relpath(read_json(script.run / FOLDER / SUBMISSION)['log'])}"
    yield f"  end it:      forge-run submit --stop {run}   (scancel {job} does not save first)"


def note(run: Path, job: str, group: str, log: str) -> None:
    """Keep which job a run was submitted as."""
    write_json(run / FOLDER / SUBMISSION, {"job": job, "group": group, "submitted": time.time(), "log": log})


def run_problems(job: Job, cluster: SlurmCluster) -> Iterator[Problem]:
    """Yields why a run cannot be queued now."""
    folder = run_folder(job)
    hook = next((each for each in job.hooks.values() if isinstance(each, Slurm)), None)
    if hook is None:
        yield Problem("hooks.slurm", "is another type of hook; name that one otherwise, since submit needs the name")
    elif message := cluster.time_problem(hook.margin_s):
        yield Problem("cluster.time", message)
    if user := owner(folder):
        yield Problem("job.name", f"{folder} is in use by {user}; give this run another name, or wait")
    earlier = read_json(folder / FOLDER / SUBMISSION).get("job")
    # With --print, this may be a machine without SLURM
    if earlier and shutil.which("squeue"):
        try:
            state = scheduler.queue_state(earlier)
        except SlurmError as error:
            state = ""
            yield Problem("", f"whether job {earlier} of {folder} is still queued is not known: {error}")
        if state:
            hint = f"`scancel {earlier}` first, or give this run another name"
            yield Problem("job.name", f"{folder} is queued already, as job {earlier}: {state}; {hint}")


def _texts(scripts: Sequence[RunScript]) -> dict[Path, str]:
    return {output_file(script.run / SCRIPT, "job.output"): script.text() for script in scripts}


@contextmanager
def written(folders: Sequence[Path], texts: Mapping[Path, str]) -> Iterator[None]:
    """Make folders and write scripts; if this context ends with an error, all is as it was before.

    Args:
        folders: of the scripts.
        texts: of the scripts, by path; what is there already is replaced.
    """
    made: list[Path] = []
    before: dict[Path, str | None] = {}
    try:
        for folder in folders:
            # From the innermost one up, in which order empty folders can be removed again
            made += [each for each in (folder, *folder.parents) if not each.exists()]
            folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            before[path] = path.read_text() if path.exists() else None
            path.write_text(text)
        yield
    # Ctrl-C too: a script of a job that was not queued must not stay
    except BaseException:
        for path, earlier in before.items():
            if earlier is None:
                path.unlink(missing_ok=True)
            else:
                path.write_text(earlier)
        for folder in made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        raise


def sbatch(script: Path, *options: str) -> str:
    """Queue a script with further options and return the number of the job; a `JobError` has SLURM's own words."""
    if shutil.which("sbatch") is None:
        raise JobError("sbatch is not on the PATH: submit on a login node of the cluster; --print prints the script")
    try:
        # With several clusters sbatch prints `job;cluster`
        return scheduler.ask("sbatch", "--parsable", *options, str(script)).partition(";")[0]
    except SlurmError as error:
        raise JobError(f"SLURM took nothing: {error}") from error
