"""`forge-run data`: look at the samples of a job, as training reads them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from forge_core.cli.command_line import parse_job_arguments, positive, with_examples

if TYPE_CHECKING:
    from forge_core.job import Job

MEASURED = 64
SHOWN = 400


def command(argv: list[str]) -> int:
    """Show the samples that a job trains on, as training reads them, and counts per source.

    Tokenizer, sources, packing and order are those of training; no model is built and no run folder is made. The first
    time, tokenising fills the same cache that training uses.
    """
    options, files, overrides = parse_job_arguments(_parser(), argv)
    from forge_core.config.load import load_job
    from forge_core.contracts.errors import ExitCode
    from forge_core.plugins.catalog import Catalog

    catalog = Catalog.installed()
    job = load_job(*files, overrides=overrides, catalog=catalog, world_size=options.world_size)
    samples = options.sample or [0]
    _check_position(job, options.step, samples)
    if sys.stderr.isatty():
        print("reading the data; the first time, it is tokenised …", file=sys.stderr)
    from forge_plugin_data_view.job_data import open_data
    from forge_plugin_data_view.view import View

    view = View.of(open_data(job, catalog), options.step, samples, options.measure, options.tokens)
    if options.json:
        import json

        print(json.dumps(view.as_json(), indent=1, ensure_ascii=False))
    else:
        from forge_plugin_data_view.screen import show

        show(view)
    return ExitCode.FINISHED


def _check_position(job: Job, step: int, samples: Sequence[int]) -> None:
    """Raises JobError where the run has no such step, or a step no such sample."""
    from forge_core.contracts.errors import JobError, Problem

    problems = []
    if step > job.train.steps:
        problems.append(Problem("", f"--step {step}: train.steps is {job.train.steps}; give 1 to {job.train.steps}"))
    batch = job.train.global_batch_size
    for sample in samples:
        if sample >= batch:
            message = f"--sample {sample}: a step has train.global_batch_size = {batch} samples"
            problems.append(Problem("", f"{message}; give 0 to {batch - 1}"))
    if problems:
        raise JobError(problems)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("forge-run data", description=command.__doc__)
    parser.add_argument("--step", type=positive, default=1, metavar="S", help="samples of this step, from 1 (1)")
    sample = "number of the sample within the step's global batch, from 0 (0); repeat it for more"
    parser.add_argument("--sample", type=from_zero, action="append", metavar="N", help=sample)
    tokens = f"tokens to show of each sample; 0: all ({SHOWN})"
    parser.add_argument("--tokens", type=from_zero, default=SHOWN, metavar="N", help=tokens)
    measure = f"samples, from the step's first one on, over which the fill is measured ({MEASURED})"
    parser.add_argument("--measure", type=positive, default=MEASURED, metavar="N", help=measure)
    ranks = "ranks that the job is to run on (1); the samples are the same on any number"
    parser.add_argument("--world-size", type=positive, default=1, metavar="N", help=ranks)
    parser.add_argument("--json", action="store_true", help="print JSON")
    with_examples(parser, "forge-run data job.toml", "forge-run data job.toml --step 100 --sample 0 --sample 7")
    return parser


def from_zero(text: str) -> int:
    """Reads a number of at least 0, as a type of argparse."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return value
