"""`forge-run data`: look at the samples of a job, as training reads them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge_core.cli.command_line import parse_job_arguments, positive, with_examples
from forge_core.contracts.errors import JobError, Problem
from forge_kit.tools.commands import count
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import (
    ANYTHING,
    COUNT,
    FLAG,
    TEXT,
    Schema,
    array,
    by_name,
    keyed,
    maybe,
    of,
    with_keys,
)

if TYPE_CHECKING:
    from forge_core.job import Job

MEASURED = 64
SHOWN = 400


HEADING = "start"


def command(argv: list[str]) -> int:
    """Show samples of a job; tokenise files.

    The samples are shown as training reads them, with counts per source. The command uses the same tokenizer, sources,
    packing and order as training. It builds no model and creates no run folder. The first call tokenises the data and
    fills the same cache that training uses.
    """
    options, files, overrides = parse_job_arguments(_parser(), argv)
    from forge_core.config.load import load_job
    from forge_core.contracts.errors import ExitCode
    from forge_core.plugins.catalog import Catalog

    catalog = Catalog.installed()
    job = load_job(*files, overrides=overrides, catalog=catalog, world_size=options.world_size)
    samples = options.sample or [0]
    # Before the data are read, which may take long
    if problems := list(position_problems(job, options.step, samples)):
        raise JobError(problems)
    # For a person who waits; a log or a pipe gets no such line
    if sys.stderr.isatty():
        print("reading the data; the first time, it is tokenised …", file=sys.stderr)
    # Imported late: these modules need torch, and errors of the command line do not
    from forge_kit.data.job_data import open_data
    from forge_plugin_plan.data_view.view import View

    view = View.of(open_data(job, catalog), options.step, samples, options.measure, options.tokens, options.documents)
    if options.json:
        print_json(view.as_json())
    else:
        from forge_plugin_plan.data_view.screen import show

        show(view)
    return ExitCode.FINISHED


def position_problems(job: Job, step: int, samples: Sequence[int]) -> Iterator[Problem]:
    """Yields a problem where the run has no such step, or a step no such sample."""
    if step > job.train.steps:
        yield Problem("", f"--step {step}: train.steps is {job.train.steps}; give 1 to {job.train.steps}")
    batch = job.train.batch_size(step)
    for sample in samples:
        if sample >= batch:
            message = f"--sample {sample}: step {step} has {batch} samples"
            yield Problem("", f"{message}; give 0 to {batch - 1}, and --step for another step")


def add_position(parser: argparse.ArgumentParser, **of_sample: Any) -> None:
    """Add the options that name samples, `--step` and `--sample`, the latter with further settings."""
    parser.add_argument("--step", type=positive, default=1, metavar="S", help="the step, from 1 (1)")
    sample = "number of the sample within the step's global batch, from 0 (0)"
    parser.add_argument("--sample", type=count, metavar="N", **{"help": sample, **of_sample})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("forge-run data", description=command.__doc__)
    repeated = "numbers of samples within the step's global batch, from 0 (0); repeat it for more"
    add_position(parser, action="append", help=repeated)
    tokens = f"tokens to show of each sample; 0: all ({SHOWN})"
    parser.add_argument("--tokens", type=count, default=SHOWN, metavar="N", help=tokens)
    measure = f"samples, from the step's first one on, over which the fill is measured ({MEASURED})"
    parser.add_argument("--measure", type=positive, default=MEASURED, metavar="N", help=measure)
    documents = "also list the documents of all samples of the step, and the files that they come from"
    parser.add_argument("--documents", action="store_true", help=documents)
    ranks = "ranks that the job is to run on (1); the samples are the same on any number"
    parser.add_argument("--world-size", type=positive, default=1, metavar="N", help=ranks)
    add_json(parser)
    with_examples(
        parser,
        "forge-run data job.toml",
        "forge-run data job.toml --step 100 --sample 0 --sample 7",
        "forge-run data runs/base/job.toml --step 9100 --documents",
    )
    return parser


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    from forge_plugin_plan.data_view.view import SourceView

    origin = keyed(file=TEXT, line=maybe(COUNT), kept=by_name(ANYTHING))
    document = keyed(position=COUNT, tokens=COUNT, document=COUNT, from_token=COUNT, origin=maybe(origin))
    pieces = array(keyed(text=TEXT, special=FLAG))
    run = keyed(
        kind=TEXT, learned=FLAG, document=maybe(COUNT), positions=COUNT, text=TEXT, pieces=pieces, ids=array(COUNT)
    )
    sample = keyed(
        sample=COUNT,
        source=TEXT,
        where=TEXT,
        positions=COUNT,
        learned=COUNT,
        padding=COUNT,
        images=array(array(COUNT)),
        entries=by_name(array(COUNT)),
        left_out=COUNT,
        runs=array(run),
        documents=array(document),
    )
    view = keyed(
        steps=COUNT,
        global_batch_size=COUNT,
        seq_len=COUNT,
        vocab_size=maybe(COUNT),
        sources=array(of(SourceView)),
        fill=keyed(samples=COUNT, positions=COUNT, learned=COUNT, ignored=COUNT, padding=COUNT),
        labels_are_next_inputs=FLAG,
        step=COUNT,
        samples=array(sample),
        documents=array(with_keys(document, sample=COUNT)),
    )
    return {"": view}
