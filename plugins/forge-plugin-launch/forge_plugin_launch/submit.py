"""`forge-run submit`: checks a job with the ranks that it will have, and sends it to a cluster."""

from __future__ import annotations

import argparse
import glob
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

from attrs import evolve, frozen

from forge_core.checkpoint.run_folder import run_folder
from forge_core.cli.command_line import parse_job_arguments, positive, with_examples
from forge_core.config.load import load_job
from forge_core.contracts.errors import ExitCode, JobError, Problem
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.json_output import add_json
from forge_kit.tools.output_schema import (
    ANYTHING,
    COUNT,
    NUMBER,
    SECONDS,
    TEXT,
    Schema,
    array,
    keyed,
    maybe,
    of,
    one_of,
)
from forge_plugin_launch.clusters import Cluster, State, SubmittedRun, read_cluster
from forge_plugin_launch.node_paths import load_for

OPTIONS = {
    "nodes": "nodes (1)",
    "gpus-per-node": "GPUs of a node, each of which gets a rank (none)",
    "tasks-per-node": "ranks of a node (one for each GPU, or one)",
    "cpus-per-task": "cores of a rank (the cluster's default)",
    "partition": "partition of SLURM (the cluster's default)",
    "account": "account to charge (the user's default)",
    "time": "time limit of one attempt: 12:00:00, 2-00 (the partition's)",
}
"""Keys of the cluster file that are options of the command too, with their help."""
CLUSTER = "--cluster."
LATER = ("status", "logs", "stop")
"""Options for a run that was submitted before."""

HEADING = "train"


def command(argv: list[str]) -> int:
    """Submit a run to SLURM, or to the cluster that a file describes.

    The job is checked before anything is sent. On SLURM the run saves before its time limit, and is queued again until
    it has finished.
    """
    parser = argparse.ArgumentParser("forge-run submit", description=command.__doc__)
    add = parser.add_argument
    add("files", nargs="*", metavar="JOB.toml", help="job files, layered from left to right")
    add_cluster_options(parser)
    add("--array", metavar="JOBS", help="each job file is a separate run, one task of an array: jobs/*.toml")
    add("--at-once", type=positive, default=0, metavar="N", help="with --array: runs at the same time (all)")
    add("--print", action="store_true", help="print what would be submitted; nothing is written or sent")
    add("--status", action="store_true", help="show a run that was submitted, named by its job or its folder")
    add("--logs", action="store_true", help="print the output of a run that was submitted")
    add("--follow", action="store_true", help="with --logs: and what it prints from now on")
    add("--stop", action="store_true", help="have a run save and stop, and not be continued")
    add_json(parser, ", with --status")
    parser.usage = "forge-run submit [OPTIONS] JOB.toml … [--section.key=value …] [-- OPTIONS OF THE CLUSTER]"
    with_examples(
        parser,
        "forge-run submit job.toml --on slurm.toml --nodes=8 --gpus-per-node=8",
        "forge-run submit --array jobs/*.toml --on slurm.toml -- --qos=high",
        "forge-run submit job.toml --on sky.toml --print",
        "forge-run submit --status runs/long",
    )
    own, options = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    # Keys of the cluster are no keys of the job
    settings = [word.removeprefix("--") for word in own if word.startswith(CLUSTER)]
    parsed, files, overrides = parse_job_arguments(parser, [word for word in own if not word.startswith(CLUSTER)])
    _refuse_combinations(parsed, options)
    cluster, problems = cluster_of(parsed, settings)
    cluster = cluster.with_options(options)
    if any(getattr(parsed, name) for name in LATER):
        # Defaults in place of wrong keys would look for the run in the wrong place
        if problems:
            raise JobError([*problems])
        return _look(parsed, cluster, _submitted(parsed, [*overrides, *settings], cluster))
    # In an array each file is a whole job, and else all of them are layers of one
    groups = [[path] for path in _array_files(parsed.array, files)] if parsed.array is not None else [files]
    if groups == [[]]:
        raise JobError("name a job file: forge-run submit job.toml")
    runs = Request(groups=groups, overrides=overrides, cluster=cluster).check(problems)
    if parsed.print:
        text = cluster.rendered(runs[0]) if parsed.array is None else cluster.rendered_array(runs, parsed.at_once)
        print(text, end="")
        return ExitCode.FINISHED
    lines = cluster.submit(runs[0]) if parsed.array is None else cluster.submit_array(runs, parsed.at_once)
    print(*lines, sep="\n")
    return ExitCode.FINISHED


def _refuse_combinations(parsed: argparse.Namespace, options: Sequence[str]) -> None:
    """Refuse options that would have no effect beside others."""
    later = [name for name in LATER if getattr(parsed, name)]
    if len(later) > 1:
        raise JobError(f"--{later[0]} and --{later[1]} are two commands; give them one after the other")
    submitting = [name for name in ("array", "at_once", "print") if getattr(parsed, name)]
    if later and (submitting or options):
        other = f"--{submitting[0].replace('_', '-')}" if submitting else f"-- {options[0]}"
        raise JobError(f"--{later[0]} is about a run that was submitted, and {other} is not")
    if parsed.json and not parsed.status:
        raise JobError("--json prints the status of a run that was submitted: forge-run submit --status RUN --json")
    if parsed.follow and not parsed.logs:
        raise JobError("--follow is about the output of a run: forge-run submit --logs RUN --follow")
    if parsed.at_once and parsed.array is None:
        raise JobError("--at-once limits an array: pass its job files with --array")


def _look(parsed: argparse.Namespace, cluster: Cluster, run: SubmittedRun) -> int:
    if parsed.status:
        cluster.show(run, parsed.json)
    elif parsed.logs:
        return cluster.logs(run, parsed.follow)
    else:
        print(*cluster.stop(run), sep="\n")
    return ExitCode.FINISHED


def _submitted(parsed: argparse.Namespace, overrides: Sequence[str], cluster: Cluster) -> SubmittedRun:
    """The run that the command line names: a run folder, or the job files with which it was submitted."""
    files: list[str] = parsed.files
    if not files:
        raise JobError("name the run folder, or the job file: forge-run submit --status runs/long")
    # A folder that is gone must not be taken for a job file either
    if len(files) == 1 and not files[0].endswith(".toml"):
        flags = [f"--{name}" for name in OPTIONS if getattr(parsed, name.replace("-", "_")) is not None]
        if further := [*overrides, *flags]:
            raise JobError(
                f"{further[0]}: {files[0]} is a run folder, and has the settings with which it was submitted"
            )
        return SubmittedRun(name=Path(files[0]).name, folder=Path(files[0]))
    # The cluster has its own keys already
    keys = [word for word in overrides if not word.startswith(CLUSTER.removeprefix("--"))]
    # By its name and folder it is found wherever its data are
    job = load_job(*files, overrides=keys, world_size=cluster.world_size, with_data=False)
    return SubmittedRun(name=job.job.name, folder=run_folder(job), job=job)


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Add the cluster file, and options for its keys, to a command that submits runs."""
    parser.add_argument("--on", metavar="CLUSTER.toml", help="where to run: a file with the table [cluster] (SLURM)")
    for name, help_ in OPTIONS.items():
        number = name not in ("partition", "account", "time")
        parser.add_argument(
            f"--{name}", type=positive if number else str, metavar="N" if number else "TEXT", help=help_
        )


def cluster_of(parsed: argparse.Namespace, settings: Sequence[str] = ()) -> tuple[Cluster, Sequence[Problem]]:
    """Returns the cluster of these options and settings (`cluster.nodes=8`), and the problems of its file."""
    given = {name: getattr(parsed, name.replace("-", "_")) for name in OPTIONS}
    own = [f"cluster.{name.replace('-', '_')}={_toml(value)}" for name, value in given.items() if value is not None]
    cluster, problems = read_cluster(parsed.on, [*own, *settings])
    # Flags as they were written: `--nodes=0`, and not the key that it sets. A setting keeps its whole key
    flags = {f"--{setting}": f"--{setting.removeprefix('cluster.')}" for setting in own}
    return cluster, [evolve(each, origin=flags.get(each.origin, each.origin)) for each in problems]


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _array_files(pattern: str, more: Sequence[str]) -> list[str]:
    """The job files of an array, whether the shell has expanded the pattern or not."""
    files = [path for each in [pattern, *more] for path in (sorted(glob.glob(each)) or [each])]
    # A file that two patterns name would collide with itself
    return list(dict.fromkeys(files))


@frozen(kw_only=True)
class Request:
    """The runs that one command submits: one, or an array."""

    groups: Sequence[Sequence[str]]
    """Job files of each run."""
    overrides: Sequence[str]
    """Of all runs."""
    cluster: Cluster
    own_overrides: Sequence[Sequence[str]] = ()
    """Of each run alone; empty: none."""
    arguments: Sequence[Sequence[str]] = ()
    """Further arguments of `forge-run` of each run, such as the checkpoint to start from; empty: none."""

    def check(self, problems: Sequence[Problem]) -> list[SubmittedRun]:
        """Check all jobs with the ranks that they will have; a `JobError` has every mistake of all of them."""
        catalog, found, runs = Catalog.installed(), list(problems), list[SubmittedRun]()
        unchecked: list[str] = []
        none: Sequence[Sequence[str]] = [()] * len(self.groups)
        for files, own, arguments in zip(self.groups, self.own_overrides or none, self.arguments or none, strict=True):
            try:
                # A copy for each job, as the cluster adds what each of them lacks
                words = [*self.overrides, *own]
                job, notes = load_for(self.cluster, files, words, catalog)
                if further := [*self.cluster.own_overrides(job)]:
                    # Read again, so that defaults of what was added are checked with the job
                    words += further
                    job, notes = load_for(self.cluster, files, words, catalog)
            except JobError as error:
                found += error.problems
                continue
            # Of jobs that are right only: others have no folder or size to ask about
            found += self.cluster.run_problems(job)
            unchecked += notes
            runs.append(
                SubmittedRun(
                    name=job.job.name,
                    folder=run_folder(job).absolute(),
                    words=(*files, *words, *arguments),
                    component_files=tuple(map(Path, catalog.files)),
                    job=job,
                )
            )
        found += _collisions(runs)
        if found:
            # Jobs of an array share the cluster and the overrides, and so many of their mistakes
            raise JobError(list(dict.fromkeys(found)))
        for note in dict.fromkeys(unchecked):
            # Not on standard output, which may be a script
            print(f"warning: {note}", file=sys.stderr)
        return runs


def _collisions(runs: Sequence[SubmittedRun]) -> Iterator[Problem]:
    """Yields the runs of an array that would share a folder."""
    by_folder: dict[Path, str] = {}
    for run in runs:
        file = run.words[0]
        if run.folder in by_folder:
            other = by_folder[run.folder]
            yield Problem("job.name", f"{run.name!r}, as in {other}: both would train in {run.folder}", file)
        by_folder.setdefault(run.folder, file)


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    from forge_plugin_launch.slurm.records import SlurmAttempt

    # Only with --status; of one that is under way, `ended` is null
    attempt = of(SlurmAttempt, ended=maybe(SECONDS))
    of_slurm = keyed(
        run=TEXT,
        job=TEXT,
        queue=TEXT,
        step=maybe(COUNT),
        steps=maybe(COUNT),
        loss=maybe(NUMBER),
        owner=TEXT,
        attempts=array(attempt),
    )
    # Types of cluster have further keys, which their pages list
    other = keyed(run=TEXT, job=TEXT, state={"enum": [*get_args(State)]}, words=TEXT)
    return {"": one_of(of_slurm, other | {"additionalProperties": ANYTHING})}
