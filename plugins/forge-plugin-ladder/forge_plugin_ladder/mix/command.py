"""`forge-run data mix`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from forge_core.cli.command_line import positive, with_examples
from forge_core.contracts.errors import ExitCode, ForgeError, JobError
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import COUNT, INTERVAL, NUMBER, TEXT, Schema, array, by_name, keyed
from forge_kit.tools.outputs import FOLDER_MARK, free_folder, output_file, write_output

if TYPE_CHECKING:
    from forge_core.job import Job
    from forge_plugin_ladder.mix.mixture import Mix, Parts
    from forge_plugin_ladder.mix.proxies import Proxies
    from forge_plugin_ladder.values import Values

HEADING = "start"
RESULTS, RECORD = "proxies.json", "comparison.json"
EXAMPLES = (
    "forge-run data mix plan mix.toml",
    "forge-run data mix run mix.toml --parallel 2",
    "forge-run data mix fit mix.toml",
    "forge-run data mix write mix.toml --out mixed.toml",
)


def command(argv: list[str]) -> int:
    """Find the mixture of sources to train on, by proxy runs.

    Proxies are trained on drawn mixtures, a law of their metrics is fitted, and the mixture that the law finds best is
    written into a job, with the interval of its gain over the natural one.
    """
    options = _parser().parse_args(argv)
    return options.action(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("forge-run data mix", description=command.__doc__)
    with_examples(parser, *EXAMPLES)
    actions = parser.add_subparsers(metavar="ACTION", required=True, help="ACTION --help has its options")
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name, function in (("plan", plan_mix), ("run", run_mix), ("fit", fit_mix), ("write", write_mix)):
        added = actions.add_parser(name, help=function.__doc__, description=function.__doc__, allow_abbrev=False)
        added.add_argument("mix", type=Path, metavar="MIX.toml", help="the mix: job, natural amounts, metrics")
        added.set_defaults(action=function)
        parsers[name] = added
    run, write = parsers["run"], parsers["write"]
    run.add_argument("--nproc", type=positive, default=1, metavar="N", help="ranks of each run (1)")
    run.add_argument("--parallel", type=positive, default=1, metavar="N", help="runs at the same time (1)")
    for name in ("fit", "write"):
        add = parsers[name].add_argument
        add("--results", type=Path, metavar="FILE", help="results of proxies, in place of the mix's own runs")
        add("--resamples", type=positive, default=200, metavar="N", help="of the residuals, for intervals (200)")
    write.add_argument("--out", type=Path, required=True, metavar="FILE", help="the job with the best weights")
    write.add_argument("--job", type=Path, metavar="JOB.toml", help="the job to change (the proxies')")
    for name in ("plan", "fit"):
        add_json(parsers[name])
    return parser


@frozen
class _Files:
    """A mix and where its files are."""

    mix: Mix
    base: Path
    job: Job
    parts: Parts
    out: Path
    catalog: Catalog

    @classmethod
    def of(cls, options: argparse.Namespace) -> _Files:
        from forge_plugin_ladder.mix.mixture import read_mix

        catalog = Catalog.installed()
        mix, base, job, parts = read_mix(options.mix, catalog)
        out = free_folder(Path(mix.output), "output", [RECORD, RESULTS, FOLDER_MARK])
        return cls(mix, base, job, parts, out, catalog)

    def shares(self) -> Values:
        from forge_plugin_ladder.mix.mixture import mixtures

        return mixtures(self.mix, self.parts)

    def results(self, given: Path | None) -> Proxies:
        """The results of a file, or of the mix's own runs."""
        from forge_plugin_ladder.mix.proxies import collect, read_proxies, trials_of

        metrics = list(self.mix.metrics)
        if given:
            return read_proxies(given, self.parts, metrics)
        shares, train = self.shares(), self.job.train
        trials = trials_of(shares, self.parts, self.base, self.out)
        return collect(trials, shares, self.parts, self.out, metrics, train.steps, train.seq_len)

    def facts(self, options: argparse.Namespace) -> dict[str, Any]:
        """The fit and the best mixture, as JSON has them."""
        import numpy as np

        from forge_core.config.mixture import source_names
        from forge_plugin_ladder.mix.proposal import limits, propose
        from forge_plugin_ladder.mix.regression import fit_mixture, rank_correlation
        from forge_plugin_ladder.mix.screen import facts_of

        found, metrics = self.results(options.results), self.mix.metrics
        usable = found.usable()
        shares = np.array([each.shares for each in usable]).reshape(-1, len(self.parts.names))
        values = np.array([[each.values[name] for name in metrics] for each in usable]).reshape(-1, len(metrics))
        fit = fit_mixture(shares, values, tuple(metrics), np.array([*metrics.values()]), options.resamples)
        epochs = dict(zip(source_names(self.job), (each.max_epochs for each in self.job.data.sources), strict=True))
        bounds = limits(self.parts, found.sizes, epochs, self.mix.tokens)
        proposal = propose(fit, self.parts, bounds, self.mix.regularization)
        ranks = rank_correlation(shares, values, fit.weights)
        return facts_of(found, fit, proposal, self.parts, self.mix.tokens) | {"rank_correlation": ranks}


def plan_mix(options: argparse.Namespace) -> int:
    """Show the mixture of every proxy; nothing is trained."""
    from forge_plugin_ladder.mix.proxies import trials_of
    from forge_plugin_ladder.mix.screen import plan_table
    from forge_plugin_runs.compare.grid import check_jobs

    files = _Files.of(options)
    shares = files.shares()
    trials = trials_of(shares, files.parts, files.base, files.out)
    # Every job as it will be run
    check_jobs(trials, 1)
    if options.json:
        rows = [dict(zip(files.parts.names, map(float, own), strict=True)) for own in shares]
        print_json([{"run": trial.name, "shares": row} for trial, row in zip(trials, rows, strict=True)])
    else:
        print(plan_table([trial.name for trial in trials], shares, files.parts, files.job))
    return ExitCode.FINISHED


def run_mix(options: argparse.Namespace) -> int:
    """Train the proxies that have not finished; the same command continues where it was interrupted."""
    from forge_plugin_ladder.mix.proxies import train, trials_of, write_proxies

    files = _Files.of(options)
    trials = trials_of(files.shares(), files.parts, files.base, files.out)
    completed, failed = train(trials, files.out, options.nproc, options.parallel, partial(print, flush=True))
    # After an interruption, too, and where some failed
    found = files.results(None)
    write_proxies(files.out / RESULTS, found)
    if not completed:
        print("interrupted; the same command continues it", file=sys.stderr)
        return ExitCode.STOPPED
    for each in found.proxies:
        if each.failed:
            print(f"{each.run}: {each.failed}; it is marked and not fitted")
    if failed:
        raise ForgeError(f"{len(failed)} of {len(trials)} runs failed: {', '.join(failed)}; see {files.out / 'logs'}")
    return ExitCode.FINISHED


def fit_mix(options: argparse.Namespace) -> int:
    """Fit the law of each metric, and show the best mixture with intervals and its gain over the natural one."""
    from forge_plugin_ladder.mix.screen import text_of

    facts = _Files.of(options).facts(options)
    if options.json:
        print_json(facts)
    else:
        print(text_of(facts))
    return ExitCode.FINISHED


def write_mix(options: argparse.Namespace) -> int:
    """Write a job with the weights of the best mixture; refused where no gain over the natural one is shown."""
    from forge_core.config.load import dump_job, load_job
    from forge_core.config.mixture import source_names
    from forge_plugin_ladder.mix.screen import comment_of

    # Before anything is read or fitted
    output_file(options.out, "--out")
    files = _Files.of(options)
    job = files.job if options.job is None else load_job(options.job, catalog=files.catalog, world_size=1)
    # In order, too: unnamed sources are their numbers
    if source_names(job) != source_names(files.job):
        theirs, ours = (", ".join(source_names(each)) for each in (job, files.job))
        raise JobError(f"--job {options.job}: has the sources {theirs}, and the proxies {ours}")
    facts = files.facts(options)
    low, high = facts["gain_interval"]
    if low <= 0:
        raise JobError(
            f"the gain of the best mixture is {facts['gain']:.4g} [{low:.4g}, {high:.4g}], and may be none; add runs, "
            "larger proxies or more tokens"
        )
    weights, names = facts["weights"], source_names(job)
    sources = tuple(evolve(source, weight=weights[name]) for name, source in zip(names, job.data.sources, strict=True))
    changed = evolve(job, data=evolve(job.data, sources=sources))
    write_output(options.out, "--out", comment_of(facts) + dump_job(changed, files.catalog))
    print(options.out)
    return ExitCode.FINISHED


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    shares = by_name(NUMBER)
    part = keyed(natural=NUMBER, share=NUMBER, interval=INTERVAL)
    counts = {"runs": COUNT, "resamples": COUNT}
    figures = dict.fromkeys(("spread", "natural", "objective", "gain", "rank_correlation"), NUMBER)
    by_source = {name: by_name(NUMBER) for name in ("metrics", "weights", "epochs", "natural_weights")}
    fit = keyed(
        law=TEXT,
        **counts,
        left_out=by_name(TEXT),
        laws=by_name(keyed(c=NUMBER, a=shares)),
        parts=by_name(part),
        **by_source,
        **figures,
        gain_interval=INTERVAL,
    )
    return {"plan": array(keyed(run=TEXT, shares=shares)), "fit": fit}
