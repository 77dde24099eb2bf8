"""`forge-run plan`: estimates for a job on a number of ranks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from forge_core.cli.command_line import parse_job_arguments, positive, with_examples
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import COUNT, FLAG, NUMBER, TEXT, Schema, array, by_name, keyed, maybe

HEADING = "start"


def command(argv: list[str]) -> int:
    """Estimate memory, time and traffic on N ranks; needs no GPU.

    The report also has the FLOPs of a step. The time is estimated with `--gpu` or `--calibrate` only.
    """
    parser = _parser()
    options, files, overrides = parse_job_arguments(parser, argv)
    timed = options.gpu is not None or options.calibrate is not None
    if options.network is not None and (not timed or options.network <= 0):
        parser.error(f"--network {options.network:g}: must be above 0, and goes with --gpu or --calibrate")
    # Imported after the options are parsed, so that help appears at once
    from forge_core.config.load import load_job
    from forge_core.contracts.errors import ExitCode
    from forge_core.plugins.catalog import Catalog
    from forge_plugin_plan.gpus import NETWORK_GBITS, find_gpu
    from forge_plugin_plan.measurements import Measurements

    # Before the job is built, which may take minutes: the name may be wrong
    gpu = find_gpu(options.gpu) if options.gpu else None
    found = Measurements.read(options.calibrate) if options.calibrate else None
    catalog = Catalog.installed()
    # Without data, which need not be on the machine that plans
    job = load_job(*files, overrides=overrides, catalog=catalog, world_size=options.world_size, with_data=False)
    from rich.console import Console

    from forge_core.parallel.initialise import DTYPES
    from forge_plugin_plan.error import Error
    from forge_plugin_plan.estimate import make_plan
    from forge_plugin_plan.facts import facts
    from forge_plugin_plan.machine import Machine
    from forge_plugin_plan.report import report

    with Console(stderr=True).status("building the job") as status:  # on a terminal only
        plan = make_plan(job, catalog, options.world_size, status.update)
    # Gbit/s to bytes a second
    network = (options.network or NETWORK_GBITS) * 1e9 / 8
    machine, error = None, None
    if found is not None:
        dtype = str(DTYPES[job.train.precision]).removeprefix("torch.")
        machine = Machine.calibrated(found, gpu, network, dtype)
        error = Error.of(plan, machine, found, options.calibrate)
    elif gpu is not None:
        machine = Machine.of_data_sheet(gpu, network)
    if options.json:
        print_json(facts(plan, machine, error))
    else:
        print(report(plan, machine, error))
    return ExitCode.FINISHED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("forge-run plan", description=command.__doc__)
    parser.add_argument("--world-size", type=positive, default=1, metavar="N", help="ranks of the run (1)")
    parser.add_argument("--gpu", metavar="NAME", help="GPU by which to bound the time: h100, h200, b200, a100 …")
    parser.add_argument(
        "--network", type=float, metavar="GBITS", help="Gbit/s that each GPU has to other nodes, with --gpu (400)"
    )
    parser.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="calibration.json of a run: measurements in place of data sheets"
    )
    add_json(parser)
    with_examples(
        parser,
        "forge-run plan job.toml",
        "forge-run plan job.toml --world-size 512 --gpu h200 --parallel.tp.degree=8",
        "forge-run plan job.toml --calibrate runs/measured/calibration.json",
    )
    return parser


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    # Without a step that can be simulated, `failure` has the reason, and figures are null
    rank = keyed(
        rank=COUNT,
        pipeline_rank=COUNT,
        state=by_name(COUNT),
        peak=maybe(COUNT),
        most=maybe(by_name(NUMBER)),
        at_peak=maybe(by_name(NUMBER)),
        flops=maybe(NUMBER),
        sent=maybe(array(keyed(along=TEXT, kind=TEXT, times=COUNT, bytes=NUMBER))),
        seconds_at_least=maybe(by_name(NUMBER)),
        latency=maybe(by_name(NUMBER)),
        launches=maybe(COUNT),
        compiled=FLAG,
        failure=TEXT,
    )
    plan = keyed(
        world_size=COUNT,
        layout=TEXT,
        device=TEXT,
        precision=TEXT,
        parameters=COUNT,
        trained_parameters=COUNT,
        tokens=COUNT,
        micro_batches=COUNT,
        micro_batch_size=COUNT,
        model_flops=maybe(NUMBER),
        gpu=maybe(TEXT),
        gpu_memory=maybe(NUMBER),
        calibration=maybe({"type": "object"}),
        lines=array(keyed(title=TEXT, text=TEXT)),
        ranks=array(rank),
    )
    return {"": plan}
