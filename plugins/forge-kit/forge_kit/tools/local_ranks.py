"""`forge-run launch local`: the ranks of a job as processes of this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from forge_core.cli.command_line import parse_job_arguments, positive, with_examples
from forge_core.config.load import load_job
from forge_core.contracts.errors import JobError
from forge_core.launch.rank_process import LOGS
from forge_kit.tools.ranks import ranks_asked_for
from forge_kit.tools.supervisor import run_ranks

HEADING = "train"
GROUP = "Start ranks here; restart them."
STDIN = "/dev/stdin"
"""What `-` stands for among job files."""


def command(argv: list[str]) -> int:
    """Start the ranks of a job on this machine: what `--nproc N` does.

    It takes the options of `forge-run run`.
    """
    parser = argparse.ArgumentParser("forge-run launch local", description=command.__doc__)
    parser.add_argument("--nproc", type=positive, required=True, metavar="N", help="ranks to start")
    as_of_run = "as of forge-run run"
    parser.add_argument("--resume", default="auto", metavar="auto|never|PATH", help=as_of_run)
    parser.add_argument("--resume-with-changes", action="store_true", help=as_of_run)
    talk = parser.add_mutually_exclusive_group()
    talk.add_argument("-q", "--quiet", action="store_true", help=as_of_run)
    talk.add_argument("-v", "--verbose", action="store_true", help=as_of_run)
    with_examples(parser, "forge-run launch local job.toml --nproc 4 --parallel.fsdp")
    options, files, overrides = parse_job_arguments(parser, argv)
    ranks_asked_for(options.nproc)  # refuses to start ranks within a rank
    if STDIN in files:
        raise JobError("each rank reads the job again, and standard input can be read once; write the job to a file")
    # Before the ranks start: each of them would report the same error.
    job = load_job(*files, overrides=overrides, world_size=options.nproc)
    logs = Path(job.job.output) / job.job.name / LOGS
    # Each rank gets this command line; of two `--nproc` the last counts, and one process starts no others.
    ranks = [sys.executable, "-m", "forge_core", "run", *argv, "--nproc=1"]
    return run_ranks(ranks, options.nproc, logs, job.launch.grace_s, job.launch.silence_timeout_s)
