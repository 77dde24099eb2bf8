"""`forge-run doctor`: is this machine fit for training?"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.cli.command_line import parse_job_arguments, positive, with_examples
from forge_core.contracts.errors import ExitCode, JobError
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import COUNT, SECONDS, TEXT, Schema, array, by_name, keyed, of, one_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forge_plugin_plan.doctor.examination import Examined
    from forge_plugin_plan.doctor.results import Surroundings


HEADING = "start"


def command(argv: list[str]) -> int:
    """Check disks, network and GPUs; rehearse faults.

    The command checks versions, devices, file systems, limits, network, ranks and scheduler, and a job if one is given.
    Each line shows what was found and, for a problem, how to fix it. The exit code is 1 if a check failed. Nothing is
    left behind, and no network is needed. On several machines, each machine checks itself.

    With --on, a run of some steps is submitted to a cluster, on as many ranks as the cluster file has: it checks
    collectives, clocks and storage of all machines together, and saves and restores its state.
    """
    # Keys of the cluster are no keys of the job
    settings = [word.removeprefix("--") for word in argv if word.startswith("--cluster.")]
    words = [word for word in argv if not word.startswith("--cluster.")]
    options, files, overrides = parse_job_arguments(_parser(), words)
    if overrides and not files:
        raise JobError(f"{overrides[0]}: is a key of a job, and there is none to check; name its file too")
    if options.on:
        _refuse_unused(options, argv)
        return _on_cluster(options, files, overrides, settings)
    without = "is about a run on a cluster, which --on names"
    if unused := [*settings, *(f"--{name}" for name in ("print", "wait") if getattr(options, name))]:
        raise JobError(f"{unused[0]}: {without}")
    from forge_plugin_plan.doctor.ranks import Ranks

    started = time.perf_counter()
    # First, since the ranks import torch while the other checks run
    ranks = Ranks(options.nproc, options.time_limit)
    try:
        examined = _examine(_surroundings(options, overrides, ranks), show=not options.json)
    finally:
        ranks.close()
    from forge_plugin_plan.doctor.examination import counts
    from forge_plugin_plan.doctor.results import State

    found = counts(examined)
    seconds = time.perf_counter() - started
    if options.json:
        print_json(_as_json(examined, seconds))
    else:
        print("\n" + ", ".join(f"{count} {state}" for state, count in found.items()) + f"; {seconds:.0f} s")
    return ExitCode.FAILED if found[State.FAILED] else ExitCode.FINISHED


def _refuse_unused(options: argparse.Namespace, argv: Sequence[str]) -> None:
    """Refuse options that would have no effect with --on."""
    # By the words, as these options have defaults
    given = {word.partition("=")[0] for word in argv}
    if unused := sorted(given & {"--nproc", "--time-limit", "--world-size"}):
        raise JobError(f"{unused[0]}: is about this machine; with --on, the cluster file has the ranks")
    if options.print and (options.wait or options.json):
        raise JobError(f"--{'wait' if options.wait else 'json'}: --print submits nothing, so that there is no report")
    if options.json and not options.wait:
        raise JobError("--json prints the report, which a run on a cluster has later: add --wait")


def _on_cluster(
    options: argparse.Namespace, files: Sequence[str], overrides: Sequence[str], settings: Sequence[str]
) -> int:
    if find_spec("forge_plugin_launch") is None:
        raise JobError("--on needs forge-plugin-launch, which is not installed: pip install forge-plugin-launch")
    from forge_plugin_plan.doctor.submission import Trial

    trial = Trial.of(options.on, settings, files, overrides, options.output)
    if options.print:
        print(trial.rendered(), end="")
        return ExitCode.FINISHED
    return trial.submit(wait_s=60.0 * options.wait, is_json=options.json)


def _examine(surroundings: Surroundings, show: bool) -> Sequence[Examined]:
    from forge_plugin_plan.doctor.examination import examine
    from forge_plugin_plan.doctor.screen import Screen

    screen = Screen() if show else None
    examined = []
    for one in examine(surroundings):
        examined.append(one)
        if screen is not None:
            screen.show(one)
    return examined


def _surroundings(options: argparse.Namespace, overrides: list[str], ranks: Any) -> Surroundings:
    from forge_kit.data.cache import cache_root
    from forge_plugin_plan.doctor.results import Surroundings

    output = options.output
    if output is None and options.files:
        from forge_plugin_plan.doctor.job import read_output

        output = read_output(options.files, overrides, options.world_size)
    return Surroundings(
        output=Path(output or "runs"),
        cache=cache_root(),
        environment=dict(os.environ),
        files=options.files,
        overrides=overrides,
        world_size=options.world_size,
        ranks=ranks,
    )


def _as_json(examined: Sequence[Examined], seconds: float) -> dict[str, Any]:
    import platform
    import socket

    from forge_plugin_plan.doctor.cluster_check import as_json
    from forge_plugin_plan.doctor.packages import versions

    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seconds": round(seconds, 1),
        "versions": versions(),
        "checks": as_json(examined),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("forge-run doctor", description=command.__doc__)
    job = "job to check too, layered from left to right"
    parser.add_argument("files", nargs="*", metavar="JOB.toml", help=job)
    output = "folder of run folders, whose file system is checked (job.output of the job, else runs)"
    parser.add_argument("--output", metavar="FOLDER", help=output)
    ranks = "processes on this machine that try collectives with each other (2)"
    parser.add_argument("--nproc", type=rank_count, default=2, metavar="N", help=ranks)
    limit = "seconds in which they must be done (60)"
    parser.add_argument("--time-limit", type=positive, default=60, metavar="S", help=limit)
    world = "ranks that the job is to run on (1)"
    parser.add_argument("--world-size", type=positive, default=1, metavar="N", help=world)
    parser.add_argument("--on", metavar="CLUSTER.toml", help="check a cluster instead, by a short run on all its ranks")
    parser.add_argument("--print", action="store_true", help="with --on: print what would be submitted, and no more")
    wait = "with --on: minutes to wait for the report; 0, the default: only submit"
    parser.add_argument("--wait", type=positive, default=0, metavar="MIN", help=wait)
    add_json(parser, ", with all versions")
    each_node = "srun --ntasks-per-node=1 forge-run doctor --output /scratch/runs"
    with_examples(
        parser,
        "forge-run doctor",
        "forge-run doctor job.toml --nproc 4",
        each_node,
        "forge-run doctor --on slurm.toml job.toml --wait 30",
    )
    return parser


def rank_count(text: str) -> int:
    """Type of the option `--nproc`."""
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError("must be at least 2: one has nobody to talk to")
    return value


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    from forge_plugin_plan.doctor.results import Result

    check = of(Result, group=TEXT, seconds=SECONDS)
    found = {"time": TEXT, "seconds": SECONDS, "versions": by_name(TEXT), "checks": array(check)}
    here, cluster = keyed(host=TEXT, system=TEXT, **found), keyed(hosts=array(TEXT), ranks=COUNT, **found)
    return {"": one_of(here, cluster)}
