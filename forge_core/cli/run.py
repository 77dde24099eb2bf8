"""`forge-run run`: train."""

from __future__ import annotations

import argparse
import os
import warnings
from typing import TYPE_CHECKING

from forge_core.cli import find_command
from forge_core.cli.command_line import parse_job_arguments, positive, with_examples
from forge_core.config.load import dump_job, load_job
from forge_core.contracts.run_end import Cause
from forge_core.launch.rank_process import RankLog, this_process
from forge_core.launch.world import World, environments, join_world
from forge_core.plugins.catalog import Catalog

if TYPE_CHECKING:
    from forge_core.engine.trainer import Summary


HEADING = "train"


def command(argv: list[str]) -> int:
    """Train a job; `forge-run job.toml` is short for it."""
    parser = argparse.ArgumentParser(prog="forge-run run", description=command.__doc__)
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="auto (the default): continue from the run folder's newest checkpoint; never: refuse a folder that has "
        "any; PATH: start from this checkpoint or run folder, where the job's own folder has none yet",
    )
    parser.add_argument(
        "--resume-with-changes",
        action="store_true",
        help="continue even if the job has changed in ways that make another run of it: objective, data, rates",
    )
    parser.add_argument(
        "--nproc",
        type=positive,
        metavar="N",
        help="start N ranks on this machine, which make one run (default: 1, unless torchrun or srun has started this "
        "process as one of several)",
    )
    talk = parser.add_mutually_exclusive_group()
    quiet, verbose = "print warnings, errors and the last lines only", "also print the resolved job and every step"
    talk.add_argument("-q", "--quiet", action="store_const", const=-1, default=0, dest="verbosity", help=quiet)
    talk.add_argument("-v", "--verbose", action="store_const", const=1, dest="verbosity", help=verbose)
    with_examples(parser, "forge-run job.toml", "forge-run base.toml layer.toml --train.steps=200 --nproc 2")
    options, _, overrides = parse_job_arguments(parser, argv)
    with this_process.stoppable():
        world = join_world()
        if options.nproc not in (None, 1):
            return find_command(Catalog.installed(), "launch local")(argv)
        if world.alone:
            for text in filter(None, (each.warning(os.environ) for each in environments().values())):
                warnings.warn(text, stacklevel=2)
            return _train(options, overrides)
        return this_process.run(world, lambda log: _train(options, overrides, world, log))


def _train(
    options: argparse.Namespace, overrides: list[str], world: World | None = None, log: RankLog | None = None
) -> int:
    """Train in this process, alone or as a rank of `world`."""
    # Every rank reads the job itself: it is a small file, and all then fail in the same way if it is wrong.
    job = load_job(*options.files, overrides=overrides, world_size=world.size if world else 1)
    this_process.verbosity, is_first = options.verbosity, world is None or world.rank == 0
    if options.verbosity > 0 and is_first:
        assert job.checked is not None, "load_job checks every job"
        print(dump_job(job, job.checked.catalog), flush=True)
    from forge_core.metrics.console import showing_progress

    with showing_progress(job.loggers if is_first else {}):
        from forge_core.engine.trainer import Trainer  # late, as torch: no error of a job waits for its import
        from forge_core.parallel.mesh import leave_group

        summary = Trainer(
            job,
            resume=options.resume,
            resume_with_changes=options.resume_with_changes,
            echo=print if options.verbosity >= 0 else lambda text: None,
            on_folder=log.open if log else lambda folder: None,
        ).run()
    if is_first:
        print(describe_summary(summary), flush=True)
    leave_group()  # last: what was printed is out even if another rank is gone and this one waits for it
    return int(summary.exit_code)


def describe_summary(summary: Summary) -> str:
    """The last lines of a run."""
    numbers = {} if summary.loss is None else {"loss": summary.loss}
    numbers |= {name: value for name, value in summary.evaluation.items() if not name.endswith("tokens")}
    figures = ": " * bool(numbers) + ", ".join(f"{name} {value:.4f}" for name, value in numbers.items())
    if summary.end.final:
        return f"ended for good at step {summary.step} ({summary.stopped}){figures}\n{summary.folder}"
    if summary.stopped:
        ending = f"stopped at step {summary.step} ({summary.stopped}), everything saved"
        command = f"the same command{' with --train.stop_after=0' if summary.end.cause is Cause.PLANNED else ''}"
        return f"{ending}{figures}\nrun {command} to continue\n{summary.folder}"
    left = f"nothing left: train.steps is {summary.step}, and that step is saved; raise it to continue"
    return f"{left if summary.loss is None else f'finished at step {summary.step}{figures}'}\n{summary.folder}"
