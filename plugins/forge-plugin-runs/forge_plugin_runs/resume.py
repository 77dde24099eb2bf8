"""`forge-run resume`: continues a run from its folder alone."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from forge_core.checkpoint.run_folder import JOB, PROVENANCE, run_folder, storage_of
from forge_core.cli.command_line import parse_job_arguments, positive, with_examples
from forge_core.config.load import load_job, parse_job
from forge_core.contracts.errors import ExitCode, ForgeError, JobError
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_plugin_runs.facts import demand_run, read_run

HEADING = "train"


def command(argv: list[str]) -> int:
    """Continue a run from its newest checkpoint; you may change keys."""
    parser = argparse.ArgumentParser("forge-run resume", description=command.__doc__)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="a run folder")
    add("--from", type=Path, metavar="DIR", dest="base", help="where relative paths of its job start, if the run was "
        "moved (the working directory of its start)")  # fmt: skip
    add("--resume-with-changes", action="store_true", help="continue even if the job has changed in ways that make "
        "another run of it: objective, data, learning rate")  # fmt: skip
    add("--nproc", type=positive, metavar="N", help="start N ranks on this machine, which make one run (1)")
    talk = parser.add_mutually_exclusive_group()
    talk.add_argument("-q", "--quiet", action="store_true", help="as in `forge-run run`")
    talk.add_argument("-v", "--verbose", action="store_true", help="as in `forge-run run`")
    with_examples(parser, "forge-run resume runs/quickstart", "forge-run resume runs/quickstart --train.steps=4000")
    options, _, overrides = parse_job_arguments(parser, argv)
    catalog = Catalog.installed()
    # Resolved now, as the working directory changes below
    run = demand_run(options.run).resolve()
    more = _go_to_start(run, options.base, catalog)
    arguments = [str(run / JOB), *more, *overrides]
    if not _anything_left(run, options.run, arguments, options.nproc, catalog):
        return ExitCode.FINISHED
    arguments += ["--resume-with-changes"] if options.resume_with_changes else []
    arguments += [f"--nproc={options.nproc}"] if options.nproc else []
    arguments += ["--quiet"] if options.quiet else ["--verbose"] if options.verbose else []
    # By its full name, as another distribution may offer a command `run`
    [train] = catalog.matching("command", "forge-run/run")
    return int(catalog.load_offer(train)(arguments))


def _go_to_start(run: Path, base: Path | None, catalog: Catalog) -> list[str]:
    """Go to where the relative paths of a run's job start; returns overrides if the run has moved.

    Raises:
        JobError: there is no job, or the run has moved and the folder in which its paths start cannot be determined.
    """
    if not (run / JOB).is_file():
        raise JobError(f"{run} has no {JOB}: the run ended before its job was kept; start it again with its job file")
    job = parse_job((run / JOB).read_text(encoding="utf-8"), str(run / JOB), catalog)
    if base is not None:
        if not base.is_dir():
            raise JobError(f"--from {base}: there is no such folder")
        os.chdir(base)
        return _as_it_lies(run, job)
    started_in = _started_in(run)
    # The recorded folder first; the run may have moved together with its project
    for folder in filter(None, (started_in, _inferred(run, job))):
        if folder.is_dir() and (folder / run_folder(job)).resolve() == run:
            os.chdir(folder)
            return []
    where = f"{started_in / run_folder(job)}" if started_in else f"{run_folder(job)}, from a folder that is not known"
    raise JobError(
        f"{run} was started as {where}, and has moved since: relative paths of its job cannot be found. "
        "Give the folder in which they start: --from DIR"
    )


def _started_in(run: Path) -> Path | None:
    try:
        recorded = json.loads((run / PROVENANCE).read_text()).get("started_in")
    except (OSError, ValueError):
        return None
    return Path(recorded) if recorded else None  # runs of earlier versions have none


def _inferred(run: Path, job: Job) -> Path | None:
    """The folder from which `output/name` leads to the run, of a run that recorded none, or moved with its project."""
    relative = run_folder(job)
    if relative.is_absolute() or ".." in relative.parts:
        return None
    parts = Path(os.path.normpath(relative)).parts
    return run.parents[len(parts) - 1] if run.parts[-len(parts) :] == parts else None


def _as_it_lies(run: Path, job: Job) -> list[str]:
    """Overrides that name the run's folder, if its job names another one."""
    if run_folder(job).resolve() == run:
        return []
    # A JSON string is a TOML string too, whatever quotes and backslashes a path has
    return [f"--job.output={json.dumps(str(run.parent))}", f"--job.name={json.dumps(run.name)}"]


def _anything_left(run: Path, shown: Path, arguments: Sequence[str], ranks: int | None, catalog: Catalog) -> bool:
    """Whether there are steps to make; if not, or if they begin at 0, print that.

    Raises:
        ForgeError: the run is running.
    """
    facts = read_run(run)
    if facts.state == "running":
        raise ForgeError(f"{shown} is running: {facts.owner}")
    file, *overrides = arguments
    job = load_job(file, overrides=overrides, catalog=catalog, world_size=ranks)
    steps = storage_of(run).steps()
    # The newest checkpoint may be damaged: then the run continues from an older one, with steps left to make
    if steps and steps[-1] >= job.train.steps and _newest_intact(run) >= job.train.steps:
        hint = f"--train.steps={2 * job.train.steps}"
        print(f"nothing left: train.steps is {job.train.steps}, and that step is saved; raise it to continue: {hint}")
        return False
    if not steps:
        print(f"{shown} has no checkpoint: it starts from step 0 again", file=sys.stderr, flush=True)
    return True


def _newest_intact(run: Path) -> int:
    from forge_core.checkpoint.resume import locate

    return int(locate(run, "sizes")[1]["step"])
