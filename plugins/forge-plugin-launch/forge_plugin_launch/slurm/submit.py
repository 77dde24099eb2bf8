"""`forge-run submit`: checks a job, writes its batch script, and queues it in SLURM."""

from __future__ import annotations

import argparse
import glob
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import field, frozen

from forge_core.checkpoint.run_folder import run_folder
from forge_core.cli.command_line import parse_job_arguments, positive, with_examples
from forge_core.config.load import load_job
from forge_core.contracts.errors import ExitCode, JobError, Problem
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.json_output import add_json
from forge_kit.tools.outputs import output_file
from forge_kit.tools.run_owner import owner
from forge_plugin_launch.slurm import scheduler
from forge_plugin_launch.slurm.cluster import OURS, SHORT, Cluster, read_cluster
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
from forge_plugin_launch.slurm.status import print_status

OPTIONS = {
    "partition": "partition of SLURM (the cluster's default)",
    "account": "account to charge (the user's default)",
    "time": "time limit of one attempt: 12:00:00, 2-00 (the partition's)",
    "nodes": "nodes (1)",
    "gpus-per-node": "GPUs of a node, each of which gets a rank (none)",
    "tasks-per-node": "ranks of a node (one for each GPU, or one)",
    "cpus-per-task": "cores of a rank (the cluster's default)",
}
"""Keys of the cluster file that are options of the command too, with their help."""
HOOK = "--hooks.slurm.type=forge-plugin-launch/slurm"


HEADING = "train"


def command(argv: list[str]) -> int:
    """Queue a run in SLURM, and requeue it until it has finished.

    The job is checked before it is queued. The run saves a checkpoint before its time limit.
    """
    parser = argparse.ArgumentParser("forge-run submit", description=command.__doc__)
    add = parser.add_argument
    add("files", nargs="*", metavar="JOB.toml", help="job files, layered from left to right")
    add_cluster_options(parser)
    add("--array", metavar="JOBS", help="each job file is a separate run, one task of an array: jobs/*.toml")
    add("--at-once", type=positive, default=0, metavar="N", help="with --array: runs at the same time (all)")
    add("--dry-run", action="store_true", help="print the script; nothing is written or queued")
    add("--status", metavar="RUN", help="show the queue, the attempts and the step of a run that was submitted")
    add_json(parser, ", with --status")
    parser.usage = "forge-run submit [OPTIONS] JOB.toml … [--section.key=value …] [-- SBATCH OPTIONS]"
    with_examples(
        parser,
        "forge-run submit job.toml --preset=cluster.toml --nodes=8 --gpus-per-node=8",
        "forge-run submit --array jobs/*.toml --preset=cluster.toml -- --qos=high",
        "forge-run submit --status runs/long",
    )
    own, options = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parsed, files, overrides = parse_job_arguments(parser, own)
    if parsed.status is not None:
        others = any(value for name, value in vars(parsed).items() if name not in ("status", "json"))
        if others or overrides or options:
            raise JobError("--status takes a run folder, --json and nothing else")
        return print_status(Path(parsed.status), is_json=parsed.json)
    if parsed.json:
        raise JobError("--json prints the status of a run that was submitted: forge-run submit --status RUN --json")
    if parsed.at_once and parsed.array is None:
        raise JobError("--at-once limits an array: pass its job files with --array")
    cluster, problems = cluster_of(parsed)
    groups = [[path] for path in _array_files(parsed.array, files)] if parsed.array is not None else [files]
    if groups == [[]]:
        raise JobError("name a job file: forge-run submit job.toml")
    submission = Submission(groups=groups, overrides=overrides, cluster=cluster, options=checked_options(options))
    scripts = submission.check(problems)
    if parsed.array is None:
        return submission.single(scripts[0], parsed.dry_run)
    return submission.array(scripts, parsed.at_once, parsed.dry_run)


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Add the cluster file, and options for its keys, to a command that submits runs."""
    parser.add_argument("--preset", metavar="CLUSTER.toml", help="settings of the cluster: its table [submit]")
    for name, help_ in OPTIONS.items():
        number = name not in ("partition", "account", "time")
        parser.add_argument(
            f"--{name}", type=positive if number else str, metavar="N" if number else "TEXT", help=help_
        )


def cluster_of(parsed: argparse.Namespace) -> tuple[Cluster, Sequence[Problem]]:
    """Returns the cluster of these options, and the problems of its file."""
    given = {name: getattr(parsed, name.replace("-", "_")) for name in OPTIONS}
    settings = [f"{name.replace('-', '_')}={_toml(value)}" for name, value in given.items() if value is not None]
    return read_cluster(parsed.preset, settings)


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _array_files(pattern: str, more: Sequence[str]) -> list[str]:
    """The job files of an array, whether the shell has expanded the pattern or not."""
    files = [path for each in [pattern, *more] for path in (sorted(glob.glob(each)) or [each])]
    # A file that two patterns name would collide with itself
    return list(dict.fromkeys(files))


def checked_options(options: Sequence[str]) -> tuple[str, ...]:
    """Options of sbatch after `--`; a `JobError` names one that has an option here."""
    for option in options:
        if not option.startswith("-"):
            raise JobError(f"-- {option}: options of sbatch are written --name=value")
        name = option.lstrip("-").partition("=")[0]
        # The value of a short option may follow without a space: -N4
        name = name if option.startswith("--") else SHORT.get(name[:1], name)
        if name in OURS:
            here = f"write --{name} before the --" if name in OPTIONS else "forge-run submit sets it itself"
            raise JobError(f"-- {option}: {here}")
    return tuple(options)


@frozen(kw_only=True)
class Submission:
    """The jobs that one command submits: a run, or an array of runs."""

    groups: Sequence[Sequence[str]]
    """Job files of each run."""
    overrides: Sequence[str]
    """Of all runs."""
    cluster: Cluster
    options: tuple[str, ...] = field(default=())
    own_overrides: Sequence[Sequence[str]] = ()
    """Of each run alone; empty: none."""
    arguments: Sequence[Sequence[str]] = ()
    """Further arguments of `forge-run` of each run, such as the checkpoint to start from; empty: none."""

    def check(self, problems: Sequence[Problem]) -> list[RunScript]:
        """Check all jobs with the ranks that they will have; a `JobError` has every mistake of all of them."""
        catalog, found, scripts = Catalog.installed(), list(problems), list[RunScript]()
        none: Sequence[Sequence[str]] = [()] * len(self.groups)
        for files, own, arguments in zip(self.groups, self.own_overrides or none, self.arguments or none, strict=True):
            try:
                # A copy for each job, as only those without the hook get it here
                words = [*self.overrides, *own]
                job = load_job(*files, overrides=words, catalog=catalog, world_size=self.cluster.world_size)
                if not any(isinstance(hook, Slurm) for hook in job.hooks.values()) and "slurm" not in job.hooks:
                    # Read again with the hook, so that its defaults are checked with the job
                    words.append(HOOK)
                    job = load_job(*files, overrides=words, catalog=catalog, world_size=self.cluster.world_size)
            except JobError as error:
                found += error.problems
                continue
            found += _run_problems(job, self.cluster)
            scripts.append(self._script(job, [*files, *words, *arguments]))
        found += _collisions(scripts)
        if found:
            # Jobs of an array share the cluster and the overrides, and so many of their mistakes
            raise JobError(list(dict.fromkeys(found)))
        return scripts

    def _script(self, job: Job, words: Sequence[str]) -> RunScript:
        run = run_folder(job).absolute()
        return RunScript(
            name=job.job.name,
            run=run,
            work=Path.cwd(),
            words=tuple(words),
            cluster=self.cluster,
            excluded=tuple(excluded_nodes(read_attempts(run))),
            options=self.options,
        )

    def single(self, script: RunScript, dry_run: bool) -> int:
        """Queue one run, or print its script."""
        if dry_run:
            print(script.text(), end="")
            return ExitCode.FINISHED
        with _written([script]):
            job = _sbatch(script.run / SCRIPT)
            note(script.run, job, job, str(script.run / FOLDER / f"{job}.log"))
        self._announce(script, job)
        return ExitCode.FINISHED

    def array(self, scripts: Sequence[RunScript], at_once: int, dry_run: bool, after: Sequence[str] = ()) -> int:
        """Queue runs as the tasks of one array, or print the scripts.

        Args:
            scripts: of the runs.
            at_once: tasks at the same time; 0: all.
            dry_run: print, and write and queue nothing.
            after: jobs that must have ended before, in whichever way.
        """
        first = scripts[0]
        output, path = first.run.parent / "slurm-%A_%a.log", first.run.parent / f"{first.name}-array.sh"
        text = array_text(scripts, at_once, output, after)
        if dry_run:
            print("\n".join([text, *(f"# {script.run / SCRIPT}\n{script.text()}" for script in scripts)]), end="")
            return ExitCode.FINISHED
        with _written(scripts, {output_file(path, "--array"): text}):
            job = _sbatch(path)
            for number, script in enumerate(scripts):
                note(script.run, f"{job}_{number}", job, str(output).replace("%A", job).replace("%a", str(number)))
        for number, script in enumerate(scripts):
            self._announce(script, f"{job}_{number}")
        return ExitCode.FINISHED

    def _announce(self, script: RunScript, job: str) -> None:
        run = os.path.relpath(script.run)
        size, nodes = self.cluster.world_size, self.cluster.nodes
        ranks = f"{size} rank{'s' if size > 1 else ''} on {nodes} node{'s' if nodes > 1 else ''}"
        print(f"{script.name}: job {job}, {ranks}")
        if script.excluded:
            print(f"  left out, having failed twice in this run: {', '.join(script.excluded)}")
        print(f"  look at it:  forge-run submit --status {run}")
        print(f"  its log:     {os.path.relpath(read_json(script.run / FOLDER / SUBMISSION)['log'])}")
        print(f"  end it:      scancel {job}   (scancel --signal=USR1 {job} saves first)")


def note(run: Path, job: str, group: str, log: str) -> None:
    """Keep which job a run was submitted as."""
    write_json(run / FOLDER / SUBMISSION, {"job": job, "group": group, "submitted": time.time(), "log": log})


def _run_problems(job: Job, cluster: Cluster) -> Iterator[Problem]:
    """Yields why a run cannot be queued now."""
    folder = run_folder(job)
    hook = next((each for each in job.hooks.values() if isinstance(each, Slurm)), None)
    if hook is None:
        yield Problem("hooks.slurm", "is another type of hook; name that one otherwise, since submit needs the name")
    elif message := cluster.time_problem(hook.margin_s):
        yield Problem("submit.time", message)
    if user := owner(folder):
        yield Problem("job.name", f"{folder} is in use by {user}; give this run another name, or wait")
    earlier = read_json(folder / FOLDER / SUBMISSION).get("job")
    # With --dry-run, this may be a machine without SLURM
    if earlier and shutil.which("squeue"):
        try:
            state = scheduler.queue_state(earlier)
        except SlurmError as error:
            state = ""
            yield Problem("", f"whether job {earlier} of {folder} is still queued is not known: {error}")
        if state:
            hint = f"`scancel {earlier}` first, or give this run another name"
            yield Problem("job.name", f"{folder} is queued already, as job {earlier}: {state}; {hint}")


def _collisions(scripts: Sequence[RunScript]) -> Iterator[Problem]:
    """Yields the runs of an array that would share a folder."""
    by_folder: dict[Path, str] = {}
    for script in scripts:
        file = script.words[0]
        if script.run in by_folder:
            other = by_folder[script.run]
            yield Problem("job.name", f"{script.name!r}, as in {other}: both would train in {script.run}", file)
        by_folder.setdefault(script.run, file)


@contextmanager
def _written(scripts: Sequence[RunScript], further: Mapping[Path, str] | None = None) -> Iterator[None]:
    """Write the scripts of runs, and `further` ones; if this context ends with an error, all is as it was before."""
    texts = {output_file(script.run / SCRIPT, "job.output"): script.text() for script in scripts} | {**(further or {})}
    made: list[Path] = []
    before: dict[Path, str | None] = {}
    try:
        for folder in [script.run / FOLDER for script in scripts]:
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


def _sbatch(script: Path) -> str:
    """Queue a script and return the number of the job; a `JobError` has SLURM's own words."""
    if shutil.which("sbatch") is None:
        raise JobError("sbatch is not on the PATH: submit on a login node of the cluster; --dry-run prints the script")
    try:
        # With several clusters sbatch prints `job;cluster`
        return scheduler.ask("sbatch", "--parsable", str(script)).partition(";")[0]
    except SlurmError as error:
        raise JobError(f"SLURM took nothing: {error}") from error
