"""`forge-run launch local`: the ranks of a job on this machine, which may be one of several nodes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from forge_core.cli.command_line import parse_job_arguments, positive, with_examples
from forge_core.config.load import load_job
from forge_core.contracts.errors import JobError
from forge_core.launch.rank_process import LOGS
from forge_kit.tools.ranks import ranks_asked_for
from forge_kit.tools.supervisor import Node, run_ranks

HEADING = "train"
GROUP = "Start ranks here; restart them."
PORT = 29400
"""Of node 0, where the ranks of all nodes meet; torchrun's default, too."""
STDIN = "/dev/stdin"
"""What `-` stands for among job files."""


def command(argv: list[str]) -> int:
    """Start the ranks of a job on this machine: what `--nproc N` does.

    It takes the options of `forge-run run`. With --nodes, the same command on each machine makes one run of all of
    them, and each ends with the exit code of the run.
    """
    parser = argparse.ArgumentParser("forge-run launch local", description=command.__doc__)
    parser.add_argument("--nproc", type=positive, required=True, metavar="N", help="ranks to start")
    parser.add_argument("--nodes", type=positive, default=1, metavar="M", help="machines with N ranks each (1)")
    parser.add_argument("--node", type=int, metavar="K", help="with --nodes: number of this machine, from 0")
    parser.add_argument("--address", metavar="ADDRESS", help="with --nodes: machine 0, as the others reach it")
    parser.add_argument("--port", type=positive, metavar="P", help=f"with --nodes: port of machine 0 ({PORT})")
    as_of_run = "as of forge-run run"
    parser.add_argument("--resume", default="auto", metavar="auto|never|PATH", help=as_of_run)
    parser.add_argument("--resume-with-changes", action="store_true", help=as_of_run)
    talk = parser.add_mutually_exclusive_group()
    talk.add_argument("-q", "--quiet", action="store_true", help=as_of_run)
    talk.add_argument("-v", "--verbose", action="store_true", help=as_of_run)
    with_examples(
        parser,
        "forge-run launch local job.toml --nproc 4 --parallel.fsdp",
        "forge-run launch local job.toml --nproc 8 --nodes 2 --node 1 --address gpu01",
    )
    options, files, overrides = parse_job_arguments(parser, argv)
    ranks_asked_for(options.nproc)  # refuses to start ranks within a rank
    if STDIN in files:
        raise JobError("each rank reads the job again, and standard input can be read once; write the job to a file")
    # Before the ranks start: each of them would report the same error.
    node = _node(options)
    job = load_job(*files, overrides=overrides, world_size=options.nproc * node.count)
    logs = Path(job.job.output) / job.job.name / LOGS
    flags = ("resume-with-changes", "quiet", "verbose")
    own = [f"--{name}" for name in flags if getattr(options, name.replace("-", "_"))]
    # With --nproc=1 a process starts no others
    words = [*files, *overrides, f"--resume={options.resume}", *own, "--nproc=1"]
    ranks = [sys.executable, "-m", "forge_core", "run", *words]
    return run_ranks(ranks, options.nproc, logs, job.launch.grace_s, job.launch.silence_timeout_s, node)


def _node(options: argparse.Namespace) -> Node:
    """This machine among the nodes; a `JobError` if it is not one of them."""
    given = {name: getattr(options, name) for name in ("node", "address", "port")}
    if options.nodes == 1:
        if extra := [name for name, value in given.items() if value is not None]:
            raise JobError(f"--{extra[0]} is for several nodes: pass their number with --nodes")
        return Node()
    if missing := [f"--{name}" for name in ("node", "address") if given[name] in (None, "")]:
        raise JobError(f"--nodes={options.nodes}: pass {' and '.join(missing)} too, by which the nodes meet")
    if not 0 <= options.node < options.nodes:
        raise JobError(f"--node={options.node}: nodes are 0 to {options.nodes - 1} (--nodes={options.nodes})")
    return Node(number=options.node, count=options.nodes, address=options.address, port=options.port or PORT)
