"""`forge-run profile`: the summary of traces."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_core.cli.command_line import with_examples
from forge_core.contracts.errors import ExitCode, JobError
from forge_kit.tools.commands import count
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import COUNT, FLAG, NUMBER, TEXT, Schema, array, by_name, keyed, maybe, one_of

HEADING = "watch"


def command(argv: list[str]) -> int:
    """Show where the time of steps, or of a run, went.

    The steps are those of a profile, which the hook `profile` writes. Of two profiles, the command shows which parts
    became slower.
    """
    parser = argparse.ArgumentParser("forge-run profile", description=command.__doc__)
    what = "a run folder (its newest profile), a folder profile/step-N, or a trace; two are compared"
    parser.add_argument("profiles", nargs="+", type=Path, metavar="RUN", help=what)
    parser.add_argument("--step", type=count, metavar="N", help="of a run folder: the profile that begins with step N")
    parser.add_argument("--rank", type=count, metavar="R", help="show or compare this rank (all, the lowest in full)")
    add_json(parser)
    parser.add_argument("--write", action="store_true", help="make profile.md and profile.json beside the traces again")
    parser.add_argument("--gpu", metavar="NAME", help="also the bounds of `forge-run plan` for this GPU: h100, a100 …")
    with_examples(parser, "forge-run profile runs/big", "forge-run profile runs/before runs/after --rank 0")
    options = parser.parse_args(argv)
    if len(options.profiles) > 2:
        parser.error("one profile is shown, two are compared: name no more")
    if len(options.profiles) == 2 and (options.write or options.gpu):
        parser.error("--write and --gpu go with one profile")
    from forge_plugin_profile.found import breakdowns, find_traces

    found = [find_traces(path, options.step, options.rank) for path in options.profiles]
    ranks = [breakdowns(traces) for traces in found]
    if len(ranks) == 2:
        return _compare(ranks, options)
    if options.write:
        _write(found[0], options.rank)
    if options.json:
        print_json({"ranks": ranks[0]})
    else:
        _show(ranks[0], found[0], options.gpu)
    return ExitCode.FINISHED


def _compare(ranks: list[list[dict[str, Any]]], options: argparse.Namespace) -> int:
    from forge_plugin_profile.comparison import compare

    first, second = ranks[0][0], ranks[1][0]
    if options.json:
        print_json({"first": first, "second": second})
    else:
        names = tuple(map(str, options.profiles))
        print(compare(first, second, (names[0], names[1])), end="")
    return ExitCode.FINISHED


def _write(traces: list[Path], rank: int | None) -> None:
    from forge_plugin_profile.found import breakdowns
    from forge_plugin_profile.recording import write_summary

    if rank is not None:
        raise JobError("--write makes the summary of all ranks: leave out --rank")
    write_summary(traces[0].parent, breakdowns(traces))


def _show(ranks: list[dict[str, Any]], traces: list[Path], gpu: str | None) -> None:
    from forge_plugin_profile.plan_bounds import bounds_table
    from forge_plugin_profile.report import report

    print(report(ranks), end="")
    if gpu is not None:
        print(f"\n{bounds_table(ranks[0], traces[0], gpu)}")


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    named = {"name": TEXT}
    times = dict.fromkeys(("forward_s", "backward_s", "communication_s", "counted_flops"), NUMBER)
    phase = keyed(**named, **dict.fromkeys(("host_s", "compute_s", "communication_s", "exposed_s"), NUMBER))
    collective = keyed(kind=TEXT, phase=TEXT, block=TEXT, times=NUMBER, seconds=NUMBER, exposed_s=NUMBER)
    rank = keyed(
        rank=COUNT,
        on_gpu=FLAG,
        steps=COUNT,
        **{name: maybe(COUNT) for name in ("first_step", "world_size", "tokens")},
        **{name: maybe(TEXT) for name in ("layout", "device", "precision")},
        step_s=NUMBER,
        idle=NUMBER,
        busy_s=by_name(NUMBER),
        exposed_s=NUMBER,
        phases=array(phase),
        collectives=array(collective),
        layers=array(keyed(**named, **times, flops=maybe(NUMBER), bound_s=maybe(NUMBER))),
        parts=array(keyed(**named, **times)),
        operators=array(keyed(**named, calls=NUMBER, own_s=NUMBER, flops=NUMBER)),
        **{name: maybe(NUMBER) for name in ("flops", "peak_flops", "peak_memory_gb", "allocated_gb")},
    )
    return {"": one_of(keyed(ranks=array(rank)), keyed(first=rank, second=rank))}
