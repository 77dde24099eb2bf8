"""`forge-run compare`."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.cli.command_line import parse_job_arguments, positive, with_examples
from forge_core.contracts.errors import ExitCode, ForgeError, JobError
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import ANYTHING, COUNT, NUMBER, TEXT, Schema, array, by_name, keyed, maybe
from forge_kit.tools.outputs import FOLDER_MARK, MARK, free_folder, output_file, write_output
from forge_kit.tools.run_owner import metrics_file

if TYPE_CHECKING:
    from forge_plugin_runs.compare.comparison import Comparison
    from forge_plugin_runs.compare.results import Outcome

OUT = "--out"
TABLE = "comparison.md"
PICTURE = "comparison.png"


TOKENIZER = "data.tokenizer"

HEADING = "train"


def command(argv: list[str]) -> int:
    """Train a job with several settings, or compare existing runs.

    Without `--search`, every combination of the settings is trained. The command writes `comparison.md` and
    `comparison.png` to the folder, best first: by held-out loss, or by training loss where a run has no evaluation.
    Runs that differ in `job.seed` alone are repetitions: mean and standard deviation are shown. The same command
    continues where it was interrupted, and further values add rows to the existing ones.
    """
    options, files, overrides = _parse(argv)
    jobs, runs = _told_apart(files)
    _check(options, jobs)
    # Before anything is trained, so that a folder that cannot be used is an error at once
    if options.out:
        options.out = _folder(Path(options.out))
    from forge_plugin_runs.compare.grid import existing, trials_of
    from forge_plugin_runs.compare.results import read_outcome

    if not jobs:
        outcomes = [read_outcome(trial, trial.cell.job) for trial in existing(runs)]
        _show(outcomes, options, options.out)
        return ExitCode.FINISHED
    comparison = _comparison(options)
    if options.search:
        completed = comparison.search(jobs[0], options.set, overrides, options.trials)
    else:
        completed = comparison.train(trials_of(jobs, options.set, overrides, comparison.out / "runs"))
    outcomes = comparison.outcomes(runs)
    _show(outcomes, options, comparison.out)
    if not completed:
        print("interrupted; the same command continues it", file=sys.stderr)
        return ExitCode.STOPPED
    # Runs of earlier commands that failed are listed too, but are no error of this one
    failed = [o.trial.name for o in outcomes if o.failed and o.trial.name in comparison.asked]
    if failed:
        count = len(comparison.asked)
        raise ForgeError(f"{len(failed)} of {count} runs failed: {', '.join(failed)}; see {comparison.logs}")
    return ExitCode.FINISHED


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    parser = argparse.ArgumentParser("forge-run compare", description=command.__doc__)
    add = parser.add_argument
    add("--set", action="append", default=[], metavar="KEY=A,B", help="values to try for a key; may come several times")
    add("--out", metavar="DIR", help="folder for runs, logs, table and picture; needed to train")
    add("--nproc", type=positive, default=1, metavar="N", help="ranks of each run (1)")
    add("--parallel", type=positive, default=1, metavar="N", help="runs at the same time, which share the cores (1)")
    halving = "stop the worse half at 1/2, 1/4, 1/8, … of the steps (successive halving); needs eval.interval"
    add("--halving", action="store_true", help=halving)
    search = "choose values by results: --set 'optimizer.lr=log(1e-4,1e-2)', uniform(a,b), int(a,b), or a list"
    add("--search", choices=["optuna"], help=search)
    add("--trials", type=positive, default=0, metavar="N", help="runs of a search, in all")
    add_json(parser)
    with_examples(
        parser,
        "forge-run compare base.toml --set optimizer.lr=1e-3,3e-3 --set job.seed=1,2 --out compared",
        "forge-run compare base.toml --set optimizer.type=adamw,muon --out compared --parallel 2 --halving",
        "forge-run compare base.toml --set 'optimizer.lr=log(1e-4,1e-2)' --search optuna --trials 20 --out searched",
        "forge-run compare runs/first runs/second",
    )
    return parse_job_arguments(parser, argv, "jobs to compare, one per file, or run folders")


def _told_apart(files: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Job files, and run folders."""
    paths = [Path(file) for file in files]
    runs = [path for path in paths if path.is_dir()]
    if wrong := [path for path in runs if not metrics_file(path).is_file()]:
        raise JobError(f"{wrong[0]} is a folder without metrics.jsonl; name job files, or run folders")
    return [path for path in paths if path not in runs], runs


def _check(options: argparse.Namespace, jobs: Sequence[Path]) -> None:
    """Refuse options that do not go together."""
    if not jobs:
        for name in ("set", "search", "halving"):
            if getattr(options, name):
                raise JobError(f"--{name} is for jobs to train, and only run folders are named; name a job file")
        return
    if not options.out:
        raise JobError("--out is missing: the folder for runs, logs, table and picture")
    if bool(options.search) != bool(options.trials):
        raise JobError("--search and --trials come together: --search optuna --trials 20")
    if options.search and len(jobs) > 1:
        raise JobError(f"--search takes one job file, and there are {len(jobs)}")
    if options.search and not options.set:
        raise JobError("--search needs something to vary: --set 'optimizer.lr=log(1e-4,1e-2)'")
    if options.halving and options.search:
        raise JobError("--halving ends runs of a grid early; a search has no grid. Leave one of them out")
    if options.halving and options.nproc > 1:
        raise JobError("--halving stops runs of one process only; leave out --nproc")


def _folder(path: Path) -> Path:
    """Returns the folder of the comparison: a new one, or the folder of an earlier comparison."""
    from forge_plugin_runs.compare.record import FILE

    path = free_folder(path, OUT, [FOLDER_MARK, FILE, TABLE])
    for name in (TABLE, PICTURE):
        output_file(path / name, OUT)
    return path


def _comparison(options: argparse.Namespace) -> Comparison:
    from forge_plugin_runs.compare.comparison import Comparison

    return Comparison(
        out=options.out,
        ranks=options.nproc,
        parallel=options.parallel,
        halving=options.halving,
        # With --json, only JSON goes to standard output
        say=lambda text: print(text, file=sys.stderr if options.json else sys.stdout, flush=True),
    )


def _show(outcomes: Sequence[Outcome], options: argparse.Namespace, out: Path | None) -> None:
    """Print the table, and write it and the picture to the folder, if there is one."""
    from forge_plugin_runs.compare.picture import draw
    from forge_plugin_runs.compare.results import as_json, as_list, as_markdown, rows_of

    rows, failed = rows_of(outcomes), [outcome for outcome in outcomes if outcome.failed]
    logs = {outcome.trial.name: (out or Path()) / "logs" / f"{outcome.trial.name}.log" for outcome in failed}
    table = as_markdown(rows, failed, logs)
    if len(rows) > 1:
        _warn_of_tokenizers({key for row in rows for key in row.cell.settings if key.startswith(TOKENIZER)})
    if out is not None and rows:
        write_output(out / TABLE, OUT, f"{table}\n\n<!-- {MARK} -->\n")
        draw(rows, out / PICTURE)
    if options.json:
        facts: dict[str, Any] = as_json(rows, failed)
        print_json(facts)
        return
    if rows:
        # A table that the terminal would wrap is printed as a list
        width = shutil.get_terminal_size().columns
        fits = max(map(len, table.splitlines())) <= width
        print(f"\n{table if fits else as_list(rows, failed, logs, width)}")
    if out is not None and rows:
        print(f"\n{out / PICTURE}")


def _warn_of_tokenizers(differing: Set[str]) -> None:
    # A loss is that of a token, and tokens of another tokenizer have more or less text
    if differing:
        keys = ", ".join(sorted(differing))
        text = f"the jobs differ in {keys}: losses of tokens cannot be compared then, nor their order here"
        print(f"warning: {text}; compare eval/bits_per_byte (forge-run show RUN --json)", file=sys.stderr)


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    # Of several seeds, figures are means
    row = keyed(
        label=TEXT,
        job=TEXT,
        settings=by_name(ANYTHING),
        runs=array(TEXT),
        ended=TEXT,
        ordered_by={"enum": ["held_out", "mean_loss"]},
        difference=maybe(NUMBER),
        held_out=maybe(NUMBER),
        held_out_std=maybe(NUMBER),
        loss=maybe(NUMBER),
        mean_loss=maybe(NUMBER),
        steps=maybe(COUNT),
        tokens=maybe(NUMBER),
        step_seconds=maybe(NUMBER),
        cpu_seconds=maybe(NUMBER),
        peak_memory=maybe(NUMBER),
    )
    return {"": keyed(rows=array(row), failed=array(keyed(label=TEXT, run=TEXT, ended=TEXT)))}
