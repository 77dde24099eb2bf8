"""`forge-run run`: train."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_core.engine.trainer import Summary


def command(argv: list[str]) -> int:
    """Train what a job describes; `forge-run job.toml` is short for `forge-run run job.toml`."""
    from forge_core.cli.arguments import parse_job_arguments

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
    options, paths, overrides = parse_job_arguments(parser, argv)
    from forge_core.config import load_job

    job = load_job(*paths, overrides=overrides, world_size=_world_size())
    from forge_core.engine.trainer import Trainer
    from forge_core.parallel.mesh import leave_group

    summary = Trainer(job, resume=options.resume, resume_with_changes=options.resume_with_changes).run()
    if _first():
        print(describe_summary(summary), flush=True)
    leave_group()
    return int(summary.exit_code)


def describe_summary(summary: Summary) -> str:
    """The last lines of a run."""
    numbers = {} if summary.loss is None else {"loss": summary.loss}
    numbers |= {name: value for name, value in summary.evaluation.items() if not name.endswith("tokens")}
    figures = ", ".join(f"{name} {value:.4f}" for name, value in numbers.items())
    if summary.stopped:
        ending = f"stopped at step {summary.step} ({summary.stopped}), everything saved: {figures}"
        return f"{ending}\nrun the same command to continue\n{summary.folder}"
    return f"finished at step {summary.step}: {figures}\n{summary.folder}"


def _world_size() -> int:
    import os

    return int(os.environ.get("WORLD_SIZE", "1"))


def _first() -> bool:
    import os

    return os.environ.get("RANK", "0") == "0"
