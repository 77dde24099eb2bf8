"""`forge-run doctor gpus`: check the machines of a run before it starts."""

from __future__ import annotations

import argparse
import os
import socket
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from forge_core.cli.command_line import parse_job_arguments, with_examples
from forge_core.contracts.errors import ExitCode, ForgeError
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import COUNT, NUMBER, TEXT, Schema, array, keyed, maybe, of
from forge_kit.tools.ranks import add_ranks, ranks_asked_for, run_on_ranks

if TYPE_CHECKING:
    import torch

    from forge_plugin_resilience.health.links import Link, Links


class Unwell(ForgeError):
    """Something is wrong with the machines; the message has what, and where."""


HEADING = "start"


def command(argv: list[str]) -> int:
    """Check GPUs, speed and links of machines before a run.

    Every rank is checked: its GPU, if it has one, a matrix product, and sums with the others. With a job, the command
    uses its device and the settings of its hooks gpu, links and stragglers. The exit code is 1 if there is a problem.
    """
    parser = argparse.ArgumentParser("forge-run doctor gpus", description=command.__doc__)
    parser.add_argument("files", nargs="*", metavar="JOB.toml", help="job that is to run, layered from left to right")
    add_ranks(parser, "one for each GPU to look at")
    add_json(parser)
    examples = (
        "forge-run doctor gpus --nproc 8",
        "srun forge-run doctor gpus job.toml",
    )
    with_examples(parser, *examples)
    options, files, overrides = parse_job_arguments(parser, argv)
    size = ranks_asked_for(options.nproc)
    job = None
    if files or overrides:
        from forge_core.config.load import load_job

        job = load_job(*files, overrides=overrides, world_size=size)
    return run_on_ranks("doctor gpus", argv, options.nproc, lambda: _check(job, options.json))


def _check(job: Any, as_json: bool) -> int:
    from forge_core.parallel.mesh import choose_device, gather_objects, global_rank, world_size
    from forge_plugin_resilience.health.links import Links, measure_links
    from forge_plugin_resilience.health.stragglers import Stragglers, matmul_ms

    hooks = list(job.hooks.values()) if job else []
    links_hook = next((hook for hook in hooks if isinstance(hook, Links)), None) or Links()
    slow = next((hook.slow for hook in hooks if isinstance(hook, Stragglers)), Stragglers().slow)
    device = choose_device(job.train.device if job else "auto")
    _join(device, world_size())
    mine = {"host": socket.gethostname(), "gpu": _gpu(device), "matmul_ms": matmul_ms(device)}
    rows = gather_objects(mine)
    links = measure_links(device, links_hook.size_mb, links_hook.rounds) if world_size() > 1 else []
    lines, wrong = report(rows, links, slow, links_hook)
    if global_rank() == 0:
        if as_json:
            print_json(facts_of(rows, links, wrong))
        else:
            print("\n".join(lines), flush=True)
        if wrong:
            raise Unwell("\n".join([f"not well, in {len(wrong)} respect{'s' if len(wrong) > 1 else ''}:", *wrong]))
    return ExitCode.FINISHED


def _join(device: torch.device, size: int) -> None:
    from forge_core.contracts.layout import Layout
    from forge_core.parallel.mesh import make_mesh

    if size > 1:
        make_mesh(Layout(replicate=size), device)  # any layout does for collectives over all ranks


def _gpu(device: torch.device) -> tuple[str, list[str]]:
    """The GPU of this rank, and its faults."""
    from forge_core.devices import query_device

    name = query_device(device, "get_device_name")
    if device.type != "cuda":
        return name or f"none ({os.cpu_count()} CPUs)", []
    from forge_plugin_resilience.health.nvml import NoNVML, device_of, faults, load_nvml, warnings_of

    try:
        reading = device_of(load_nvml(), device).read()
    except NoNVML as error:
        return name, [f"not looked at: {error}"]
    return name, [*faults(None, reading), *warnings_of(None, reading)]


def report(rows: Sequence[Any], links: Sequence[Link], slow: float, hook: Links) -> tuple[list[str], list[str]]:
    """Returns the lines to print, and the problems."""
    from forge_plugin_resilience.health.links import slow_links

    cells, wrong = [("rank", "host", "GPU", "matrix product", "state")], []
    for rank, row in enumerate(rows):
        name, faults = row["gpu"]
        # A rank alone is compared with itself, and so never slow
        others = [other["matmul_ms"] for number, other in enumerate(rows) if number != rank] or [row["matmul_ms"]]
        states = list(faults)
        if row["matmul_ms"] > slow * statistics.median(others):
            states.append(f"slow: the median of the others is {statistics.median(others):.3g} ms")
        wrong += [f"rank {rank} on {row['host']}: {state}" for state in states]
        cells.append((str(rank), row["host"], name, f"{row['matmul_ms']:.3g} ms", "; ".join(states) or "well"))
    lines = _table(cells)
    if links:
        measured = [("sum over", "GB/s", "state")]
        measured += [
            (str(link), f"{link.gigabytes_per_s:.3g}", "right" if link.is_right else "WRONG") for link in links
        ]
        lines += ["", *_table(measured)]
    wrong += [f"the sum over {link} is wrong" for link in links if not link.is_right]
    wrong += slow_links(links, hook.slow, hook.least_gb_per_s)
    return [*lines, *([] if wrong else ["", "all is well"])], wrong


def facts_of(rows: Sequence[Any], links: Sequence[Link], wrong: Sequence[str]) -> dict[str, Any]:
    """What `--json` prints: each rank, each link that was measured, and the problems in words."""
    ranks = []
    for rank, row in enumerate(rows):
        name, faults = row["gpu"]
        ranks.append({"rank": rank, "host": row["host"], "gpu": name, "matmul_ms": row["matmul_ms"], "faults": faults})
    return {"ranks": ranks, "links": [attrs.asdict(link) for link in links], "problems": list(wrong)}


def _table(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    from forge_plugin_resilience.health.links import Link

    rank = keyed(rank=COUNT, host=TEXT, gpu=TEXT, matmul_ms=maybe(NUMBER), faults=array(TEXT))
    return {"": keyed(ranks=array(rank), links=array(of(Link)), problems=array(TEXT))}
