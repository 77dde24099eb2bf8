"""`forge-run ladder`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve, frozen

from forge_core.cli.command_line import positive, with_examples
from forge_core.contracts.errors import ExitCode, ForgeError, JobError, Problem
from forge_core.plugins.catalog import Catalog, install_line
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import COUNT, FLAG, NUMBER, Schema, array, keyed, maybe, of
from forge_kit.tools.outputs import FOLDER_MARK, free_folder, write_output

if TYPE_CHECKING:
    from forge_plugin_ladder.intervals import Resampled
    from forge_plugin_ladder.ladder import Ladder
    from forge_plugin_ladder.planned import Planned
    from forge_plugin_ladder.points import Point

HEADING = "train"
LAUNCH, LAUNCH_NAME = "forge_plugin_launch", "forge-plugin-launch"
POINTS, FIT, REPORT, PICTURE, RECORD = "points.json", "fit.json", "report.md", "report.png", "comparison.json"
EXAMPLES = (
    "forge-run ladder plan ladder.toml",
    "forge-run ladder plan ladder.toml --gpu h100",
    "forge-run ladder run ladder.toml --parallel 2",
    "forge-run ladder submit ladder.toml --on=slurm.toml -- --qos=high",
    "forge-run ladder fit ladder.toml",
    "forge-run ladder fit ladder.toml --points measured.json",
    "forge-run ladder predict ladder.toml --flops 1e20 1e21",
    "forge-run ladder report ladder.toml",
    "forge-run ladder critical-batch runs/mine --tokens 1e6 --out batches",
)


def command(argv: list[str]) -> int:
    """Predict larger runs from small ones.

    A job is trained at several sizes and budgets, a law of the loss is fitted, and the loss of larger budgets follows.
    """
    # Options of sbatch follow after `--`
    own, further = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    if own[:1] == ["submit"] and find_spec(LAUNCH) is None:
        # Before the options are read, of which most are its own
        raise JobError(
            [
                Problem("", "runs are queued by forge-plugin-launch, which is not installed"),
                *install_line([LAUNCH_NAME]),
            ]
        )
    options = _parser().parse_args(own)
    if further and options.action is not submit_ladder:
        raise JobError(f"-- {further[0]}: options of sbatch, which `ladder submit` takes")
    options.sbatch = further
    return options.action(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("forge-run ladder", description=command.__doc__)
    with_examples(parser, *EXAMPLES)
    actions = parser.add_subparsers(metavar="ACTION", required=True, help="ACTION --help has its options")
    add = partial(_add, actions)
    plan, run, fit = add("plan", plan_ladder), add("run", run_ladder), add("fit", fit_ladder)
    run.add_argument("--nproc", type=positive, default=1, metavar="N", help="ranks of each run (1)")
    run.add_argument("--parallel", type=positive, default=1, metavar="N", help="runs at the same time (1)")
    _add_hardware(plan)
    submit = add("submit", submit_ladder)
    submit.usage = "forge-run ladder submit [OPTIONS] LADDER.toml [-- SBATCH OPTIONS]"
    if find_spec(LAUNCH) is not None:
        from forge_plugin_launch.submit import add_cluster_options

        add_cluster_options(submit)
    submit.add_argument("--at-once", type=positive, default=0, metavar="N", help="runs at the same time (all)")
    submit.add_argument("--print", action="store_true", help="print the scripts; nothing is written or queued")
    predict, report = add("predict", predict_ladder), add("report", report_ladder)
    predict.add_argument(
        "--flops", type=float, nargs="+", required=True, metavar="C", help="budgets, by the model's own count"
    )
    predict.add_argument("--far", action="store_true", help="beyond 100 times the largest run, too")
    for action in (fit, predict, report):
        action.add_argument(
            "--points", type=Path, metavar="FILE", help="a table of points, in place of the ladder's runs"
        )
    fit.add_argument("--resamples", type=positive, default=1000, metavar="N", help="of the runs, for intervals (1000)")
    for action in (predict, report):
        action.add_argument("--level", type=probability, default=0.9, metavar="P", help="of intervals (0.9)")
    batch = actions.add_parser(
        "critical-batch",
        help=critical_batch.__doc__,
        description=critical_batch.__doc__,
        allow_abbrev=False,
    )
    batch.set_defaults(action=critical_batch)
    batch.add_argument("run", type=Path, metavar="RUN", help="folder of a run that has checkpoints")
    batch.add_argument("--step", type=positive, default=0, metavar="S", help="of the checkpoint (the newest)")
    batch.add_argument(
        "--factors", type=positive, nargs="+", default=[1, 2, 4, 8], metavar="K", help="of its batch (1 2 4 8)"
    )
    batch.add_argument("--tokens", type=float, required=True, metavar="N", help="to train in each branch")
    batch.add_argument(
        "--rate-power", type=float, default=0.5, metavar="P", help="the rate is multiplied by K to this power (0.5)"
    )
    batch.add_argument("--tolerance", type=float, default=0.01, metavar="NATS", help="of the loss (0.01)")
    batch.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the branches")
    batch.add_argument("--nproc", type=positive, default=1, metavar="N", help="ranks of each branch (1)")
    batch.add_argument("--parallel", type=positive, default=1, metavar="N", help="branches at the same time (1)")
    for action in (plan, fit, predict, batch):
        add_json(action)
    return parser


def _add(actions: Any, name: str, function: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """Add an action whose help is the docstring of its function."""
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=function.__doc__, description=function.__doc__, allow_abbrev=False
    )
    parser.add_argument("ladder", type=Path, metavar="LADDER.toml", help="the ladder: job, sizes, budgets, rules")
    parser.set_defaults(action=function)
    return parser


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--memory", action="store_true", help="estimate the peak memory of each run, by a simulated step")
    add("--gpu", metavar="NAME", help="memory, whether it fits, and hours at least on this GPU: h100, h200, b200 …")
    add("--network", type=float, default=0.0, metavar="GBITS", help="Gbit/s of each GPU to other nodes (400)")
    add("--calibrate", type=Path, metavar="FILE", help="calibration.json of a run, in place of data sheets")
    add("--nproc", type=positive, default=1, metavar="N", help="ranks of each run (1)")


def probability(text: str) -> float:
    """Reads a number between 0 and 1, as `argparse` does."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError("must be between 0 and 1")
    return value


@frozen
class _Files:
    """A ladder and where its files are."""

    ladder: Ladder
    base: Path
    out: Path
    catalog: Catalog

    @classmethod
    def of(cls, options: argparse.Namespace) -> _Files:
        from forge_plugin_ladder.ladder import read_ladder

        # One catalog for all, as it remembers how a stranger's class was spelt
        catalog = Catalog.installed()
        ladder = read_ladder(options.ladder, catalog)
        base = options.ladder.parent / Path(ladder.job).expanduser()
        out = free_folder(Path(ladder.output), "output", [RECORD, POINTS, FIT, FOLDER_MARK])
        return cls(ladder, base, out, catalog)

    @property
    def total(self) -> bool:
        return self.ladder.count == "parameters_total"

    def planned(self) -> list[Planned]:
        from forge_plugin_ladder.ladder import plan_runs

        return plan_runs(self.ladder, self.base, self.catalog)

    def points(self, given: Path | None) -> list[Point]:
        """The points of a file, or of the ladder's own runs."""
        from forge_plugin_ladder.points import read_points
        from forge_plugin_ladder.runs import collect

        if given:
            return read_points(given)
        return collect(self.planned(), self.base, self.out, self.ladder)

    def fitted(self, points: Sequence[Point]) -> Resampled:
        from forge_plugin_ladder.store import read_fit

        return read_fit(self.out / FIT, self.ladder.law, points, self.ladder.count, self.law_type, self.ladder.accuracy)

    @property
    def law_type(self) -> str:
        return self.catalog.type_of(type(self.ladder.law))


def plan_ladder(options: argparse.Namespace) -> int:
    """Show every run: parameters, tokens, steps, FLOPs, what rules set, memory and hours; nothing is trained."""
    from forge_plugin_ladder.needs import Hardware, with_needs
    from forge_plugin_ladder.screen import plan_table

    files = _Files.of(options)
    runs = files.planned()
    has_machine = options.gpu is not None or options.calibrate is not None
    if options.network < 0 or (options.network and not has_machine):
        raise JobError(f"--network {options.network:g}: must be above 0, and goes with --gpu or --calibrate")
    if has_machine or options.memory:
        hardware = Hardware(
            ranks=options.nproc, gpu=options.gpu or "", network=options.network, calibration=options.calibrate
        )
        runs = with_needs(runs, files.base, files.catalog, hardware)
    elif options.nproc > 1:
        raise JobError("--nproc divides memory and time, which --memory, --gpu or --calibrate estimate")
    if options.json:
        print_json([asdict(run) for run in runs])
    else:
        print(plan_table(runs, files.ladder.trunk))
    return ExitCode.FINISHED


def run_ladder(options: argparse.Namespace) -> int:
    """Train the runs that have not finished; the same command continues where it was interrupted."""
    from forge_plugin_ladder.points import write_points
    from forge_plugin_ladder.runs import collect, train

    files = _Files.of(options)
    runs, trunk = files.planned(), files.ladder.trunk
    say = partial(print, flush=True)
    completed, failed = train(runs, files.base, files.out, options.nproc, options.parallel, trunk, say)
    # After an interruption, too: an interrupted ladder has some of its points
    points = collect(runs, files.base, files.out, files.ladder)
    write_points(files.out / POINTS, points)
    if not completed:
        print("interrupted; the same command continues it", file=sys.stderr)
        return ExitCode.STOPPED
    without = {point.run: point.failed for point in points if point.failed}
    for name, reason in without.items():
        print(f"{name}: {reason}; its point is marked and not fitted")
    if failed:
        raise ForgeError(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}; see {files.out / 'logs'}")
    return ExitCode.FINISHED


def submit_ladder(options: argparse.Namespace) -> int:
    """Queue the runs that have not finished on SLURM, as arrays; branches wait for their trunks."""
    from forge_plugin_ladder.submission import Queue, submit
    from forge_plugin_launch.slurm.cluster import SlurmCluster
    from forge_plugin_launch.submit import cluster_of

    files = _Files.of(options)
    cluster, problems = cluster_of(options)
    if not isinstance(cluster, SlurmCluster):
        # Branches wait for jobs of their trunks, which other types cannot express yet
        raise JobError.at("cluster.type", "must be slurm: a ladder is queued as arrays, of which one waits for another")
    queue = Queue(
        cluster=cluster.with_options(options.sbatch),
        problems=problems,
        at_once=options.at_once,
        print_only=options.print,
    )
    submit(files.planned(), files.base, files.out, files.ladder.trunk, queue, partial(print, flush=True))
    return ExitCode.FINISHED


def fit_ladder(options: argparse.Namespace) -> int:
    """Fit the law to the points, with intervals from resampled runs, and try it on the largest budget."""
    from forge_plugin_ladder.accuracy import fit_curve
    from forge_plugin_ladder.fitting import fit
    from forge_plugin_ladder.intervals import resample
    from forge_plugin_ladder.parabolas import iso_flops
    from forge_plugin_ladder.prediction import held_out
    from forge_plugin_ladder.screen import fit_facts, fit_text
    from forge_plugin_ladder.store import write_fit
    from forge_plugin_ladder.tuning import best_points, tune

    files = _Files.of(options)
    all_points, law = files.points(options.points), files.ladder.law
    points = best_points(all_points)
    resampled = resample(fit(law, points, files.total), points, files.total, options.resamples)
    if files.ladder.accuracy:
        usable = [point for point in points if point.usable]
        resampled = evolve(resampled, curve=fit_curve(usable, resampled.draws))
    facts = fit_facts(
        resampled,
        points,
        iso_flops(points, files.total),
        held_out(law, points, files.total, max(100, options.resamples // 5)),
        files.ladder.count,
        tune(all_points, options.resamples),
    )
    files.out.mkdir(parents=True, exist_ok=True)
    # With points of other programs, nothing has made the folder yet
    (files.out / FOLDER_MARK).touch()
    write_fit(files.out / FIT, resampled, points, files.ladder.count, files.law_type, files.ladder.accuracy)
    if options.json:
        print_json(facts)
    else:
        print(fit_text(facts))
    return ExitCode.FINISHED


def predict_ladder(options: argparse.Namespace) -> int:
    """Predict the best size, its tokens and loss for budgets, with intervals."""
    from forge_plugin_ladder.prediction import predict
    from forge_plugin_ladder.screen import prediction_table
    from forge_plugin_ladder.tuning import best_points, laws_of, tune

    files = _Files.of(options)
    all_points = files.points(options.points)
    points = best_points(all_points)
    resampled = files.fitted(points)
    tuned = laws_of(tune(all_points, len(resampled.exponents)))
    found = [
        predict(resampled, flops, points, files.total, options.level, options.far, tuned)
        for flops in sorted(options.flops)
    ]
    if options.json:
        print_json([asdict(each) for each in found])
    else:
        print(prediction_table(found, options.level))
    return ExitCode.FINISHED


def report_ladder(options: argparse.Namespace) -> int:
    """Write a report: each point with its run, the law, IsoFLOP curves, residuals and the frontier."""
    import numpy as np

    from forge_kit.tools.outputs import output_file
    from forge_plugin_ladder.parabolas import iso_flops
    from forge_plugin_ladder.picture import draw
    from forge_plugin_ladder.prediction import held_out, predict
    from forge_plugin_ladder.screen import fit_facts, report_text
    from forge_plugin_ladder.tuning import best_points, laws_of, tune

    files = _Files.of(options)
    all_points = files.points(options.points)
    points = best_points(all_points)
    resampled = files.fitted(points)
    flops = [point.flops for point in points if point.usable]
    # Within the ladder, to be compared with its points, and ten times beyond
    budgets = np.geomspace(min(flops), 10 * max(flops), 12)
    tuned = tune(all_points, len(resampled.exponents))
    laws = laws_of(tuned)
    frontier = [predict(resampled, float(each), points, files.total, options.level, tuned=laws) for each in budgets]
    tried = held_out(files.ladder.law, points, files.total, 200, options.level)
    facts = fit_facts(resampled, points, iso_flops(points, files.total), tried, files.ladder.count, tuned)
    text = report_text(facts, all_points, frontier, options.level, PICTURE)
    # Both before either is written
    for name in (REPORT, PICTURE):
        output_file(files.out / name, "output")
    write_output(files.out / REPORT, "output", text)
    draw(resampled, points, frontier, files.total, files.out / PICTURE)
    print(files.out / REPORT)
    print(files.out / PICTURE)
    return ExitCode.FINISHED


def critical_batch(options: argparse.Namespace) -> int:
    """Measure the critical batch size at a checkpoint, by branches with larger batches over the same samples."""
    from forge_plugin_ladder.critical_batch import critical, measure, noise_scale, plan, text_of

    out = free_folder(options.out, "--out", [RECORD, FOLDER_MARK])
    found = plan(options.run, options.step, options.factors, options.tokens, options.rate_power)
    say = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    branches = measure(found, out, options.nproc, options.parallel, say)
    if branches is None:
        print("interrupted; the same command continues it", file=sys.stderr)
        return ExitCode.STOPPED
    if options.json:
        last = critical(branches, options.tolerance)
        facts = {"step": found.step, "critical_batch": last.batch, "is_bound": last is branches[-1]}
        print_json({**facts, "noise_scale": noise_scale(found), "branches": [asdict(branch) for branch in branches]})
    else:
        print(text_of(found, branches, options.tolerance))
    return ExitCode.FINISHED


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    from forge_plugin_ladder.critical_batch import Branch
    from forge_plugin_ladder.planned import Planned
    from forge_plugin_ladder.prediction import Prediction
    from forge_plugin_ladder.schema import FIT

    branches = {"noise_scale": maybe(NUMBER), "branches": array(of(Branch))}
    return {
        "plan": array(of(Planned)),
        "fit": FIT,
        "predict": array(of(Prediction)),
        "critical-batch": keyed(step=COUNT, critical_batch=COUNT, is_bound=FLAG, **branches),
    }
