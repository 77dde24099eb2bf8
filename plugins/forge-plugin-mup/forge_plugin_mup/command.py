"""`forge-run ladder check-coordinates`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict

from forge_core.cli.command_line import parse_job_arguments, positive, with_examples
from forge_core.contracts.errors import ExitCode, JobError
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import NUMBER, TEXT, Schema, array, keyed, of
from forge_kit.tools.outputs import output_file
from forge_kit.tools.tables import columns

if TYPE_CHECKING:
    from forge_core import Catalog, Job
    from forge_plugin_mup.coordinates import Trend
    from forge_plugin_mup.mup import MuP

HEADING = "train"
FACTORS, BOUND, STEPS, PICTURE = (1, 2, 4), 0.25, 4, "coordinates.png"


def factors(text: str) -> tuple[int, ...]:
    """Reads ascending whole numbers, `1,2,4`, as `argparse` does.

    Raises:
        ArgumentTypeError: they are not, or fewer than two.
    """
    parts = text.split(",")
    found = tuple(int(part) for part in parts if part.isdecimal())
    if len(found) < 2 or len(found) < len(parts) or sorted({*found}) != [*found] or not found[0]:
        raise argparse.ArgumentTypeError(f"must be two or more ascending whole numbers, such as 1,2,4, got {text!r}")
    return found


def command(argv: list[str]) -> int:
    """Check that activations stay the same at all sizes.

    The job is trained for some steps at multiples of the width and the depth of the base that its plugin `mup` names.
    Activations, logits and their change are drawn against both. The command fails if one grows or vanishes: then rates
    do not transfer.
    """
    options, files, overrides = parse_job_arguments(_parser(), argv)
    # Before anything is trained
    picture = output_file(Path(options.out), "--out", (".png", ".svg", ".pdf"))
    from forge_core.config.load import load_job
    from forge_core.plugins.catalog import Catalog

    catalog = Catalog.installed()
    job = load_job(*files, overrides=overrides, catalog=catalog, world_size=1)
    found = [
        trend
        for axis, own in _axes(options, _plugin(job)).items()
        for trend in _measured(axis, own, job, options, catalog)
    ]
    faults = {trend: fault for trend in found if (fault := trend.fault(options.bound))}
    from forge_plugin_mup.picture import draw

    draw(found, picture)
    if options.json:
        rows = [{**asdict(trend), "fault": faults.get(trend, "")} for trend in found]
        print_json({"trends": rows, "bound": options.bound, "picture": picture})
    else:
        print(_table(found, faults))
        print(f"picture: {picture}")
    # On standard error, with JSON too: the reason for the exit code
    for trend, fault in faults.items():
        print(
            f"{trend.quantity}, {trend.what}, {fault} with {trend.axis}: ~ {trend.axis}^{trend.exponent:.2f}",
            file=sys.stderr,
        )
    return ExitCode.FAILED if faults else ExitCode.FINISHED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="forge-run ladder check-coordinates", description=command.__doc__)
    for axis in ("width", "depth"):
        text = f"multiples of the base's {axis} (1,2,4" + (")" if axis == "width" else "; none with `mup`)")
        parser.add_argument(f"--{axis}s", type=factors, metavar="LIST", help=text)
    parser.add_argument("--steps", type=positive, default=STEPS, metavar="N", help=f"of each size ({STEPS})")
    parser.add_argument(
        "--bound",
        type=float,
        default=BOUND,
        metavar="X",
        help=f"largest exponent of size or depth that passes ({BOUND})",
    )
    parser.add_argument("--without", action="store_true", help="train without the plugin, to see what it changes")
    parser.add_argument("--out", default=PICTURE, metavar="FILE", help=f"picture: .png, .svg or .pdf ({PICTURE})")
    add_json(parser)
    with_examples(
        parser,
        "forge-run ladder check-coordinates job.toml",
        "forge-run ladder check-coordinates job.toml --widths 1,2,4,8 --steps 8",
        "forge-run ladder check-coordinates job.toml --without",
    )
    return parser


def _plugin(job: Job) -> MuP:
    from forge_plugin_mup.mup import MuP

    for plugin in job.plugins.values():
        if isinstance(plugin, MuP):
            return plugin
    raise JobError.at("plugins", "has no plugin `mup`, whose base is the smallest size; add [plugins.mup.base]")


def _axes(options: argparse.Namespace, plugin: MuP) -> dict[str, Sequence[int]]:
    """The multiples of each axis, of which the base must have keys."""
    # At another depth, `mup` refuses the model
    depths = options.depths or (() if plugin.parametrization == "mup" else FACTORS)
    axes = {"width": options.widths or FACTORS, "depth": depths}
    for axis, own in axes.items():
        if own and not plugin.grows(axis):
            raise JobError.at(
                "plugins.mup.base", f"has no key that grows with the {axis}; add it, as --{axis}s needs it"
            )
    return {axis: own for axis, own in axes.items() if own}


def _measured(axis: str, own: Sequence[int], job: Job, options: argparse.Namespace, catalog: Catalog) -> list[Trend]:
    from forge_plugin_mup.coordinates import measure, sizes_of, trends
    from forge_plugin_mup.mup import MuP

    plugins = {name: each for name, each in job.plugins.items() if not (options.without and isinstance(each, MuP))}
    measured = []
    # One axis at a time: the other one stays as it is in the base
    for factor in own:
        sizes = {"width": 1, "depth": 1} | {axis: factor}
        # For a person who waits; a log or a pipe gets no such line
        if sys.stderr.isatty():
            print(f"training at {axis} x {factor} …", file=sys.stderr)
        keys = sizes_of(_plugin(job), sizes["width"], sizes["depth"])
        measured.append(measure(job, catalog, keys, options.steps, plugins))
    return trends(axis, own, measured)


def _table(found: Sequence[Trend], faults: Any) -> str:
    texts = []
    for axis in dict.fromkeys(trend.axis for trend in found):
        own = [trend for trend in found if trend.axis == axis]
        rows = [["", "", *(f"{axis} x {factor}" for factor in own[0].factors), "exponent", ""]]
        for trend in own:
            values = [f"{value:.3g}" for value in trend.values]
            rows.append([trend.quantity, trend.what, *values, f"{trend.exponent:+.2f}", faults.get(trend, "")])
        texts.append(columns(rows))
    return "\n\n".join(texts)


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    from forge_plugin_mup.coordinates import Trend

    return {"": keyed(trends=array(of(Trend, fault=TEXT)), bound=NUMBER, picture=TEXT)}
