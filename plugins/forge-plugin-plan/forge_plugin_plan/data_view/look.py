"""`forge-run data picture`: a picture of a sample of a job, as the model gets it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from forge_core.cli.command_line import parse_job_arguments, positive, with_examples
from forge_core.contracts.errors import JobError
from forge_kit.tools.commands import count
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import COUNT, TEXT, Schema, array, keyed
from forge_kit.tools.outputs import output_file, write_output
from forge_plugin_plan.data_view.command import add_position, position_problems

SUFFIXES = (".png", ".html")
SHOWN = 4000


HEADING = "start"


def command(argv: list[str]) -> int:
    """Draw a sample as the model gets it: images in patches, and text.

    Images and clips are put together from the patches of the row, cut where the encoder and the adapter cut them.
    Learned tokens are green. No weights are made, and no run folder.
    """
    options, files, overrides = parse_job_arguments(_parser(), argv)
    # Before the data are read, so that a path that cannot be written is an error at once
    path = output_file(options.out, "--out", SUFFIXES)
    from forge_core.config.load import load_job
    from forge_core.contracts.errors import ExitCode
    from forge_core.plugins.catalog import Catalog

    catalog = Catalog.installed()
    job = load_job(*files, overrides=overrides, catalog=catalog, world_size=options.world_size)
    if problems := list(position_problems(job, options.step, [options.sample])):
        raise JobError(problems)
    if sys.stderr.isatty():
        print("reading the data; the first time, it is tokenised and images are measured …", file=sys.stderr)
    from forge_kit.data.job_data import open_data
    from forge_plugin_plan.data_view.sheet import Sheet

    number = job.train.sample_after(options.step - 1) + options.sample
    sheet = Sheet.of(open_data(job, catalog), number, options.tokens)
    if path.suffix.lower() == ".html":
        from forge_plugin_plan.data_view.look_html import html_of

        content = html_of(sheet)
    else:
        from forge_plugin_plan.data_view.look_png import png_of

        content = png_of(sheet)
    write_output(path, "--out", content)
    if options.json:
        place = {"step": options.step, "sample": options.sample}
        print_json({"out": path, **place, "title": sheet.title, "faults": sheet.faults})
        return ExitCode.FINISHED
    print(f"{sheet.title}\n{path}")
    for fault in sheet.faults:
        print(f"! {fault}")
    return ExitCode.FINISHED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("forge-run data picture", description=command.__doc__)
    add_position(parser, default=0)
    out = "file to write, which ends in .png or .html (look.png); the HTML needs no other file"
    parser.add_argument("--out", type=Path, default=Path("look.png"), metavar="FILE", help=out)
    tokens = f"tokens to show; 0: all ({SHOWN})"
    parser.add_argument("--tokens", type=count, default=SHOWN, metavar="N", help=tokens)
    ranks = "ranks that the job is to run on (1); the samples are the same on any number"
    parser.add_argument("--world-size", type=positive, default=1, metavar="N", help=ranks)
    add_json(parser, ": the file that was written, and the faults of the sample")
    with_examples(
        parser,
        "forge-run data picture job.toml",
        "forge-run data picture job.toml --step 100 --sample 7 --out look.html",
    )
    return parser


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    return {"": keyed(out=TEXT, step=COUNT, sample=COUNT, title=TEXT, faults=array(TEXT))}
