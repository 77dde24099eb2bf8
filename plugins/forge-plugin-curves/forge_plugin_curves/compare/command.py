"""`forge-run compare`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forge_core.cli.command_line import parse_job_arguments
from forge_core.contracts.errors import ExitCode, ForgeError

if TYPE_CHECKING:
    from forge_plugin_curves.compare.grid import Trial
    from forge_plugin_curves.compare.results import Outcome


def command(argv: list[str]) -> int:
    """Run jobs with every combination of some settings, one after the other, and compare their curves.

    Writes `comparison.md` and `comparison.png` to the folder, best first: by held-out loss, or by training loss where a
    job has no evaluation. Runs that differ in `job.seed` alone are repetitions: mean and standard deviation are given.
    The same command continues where it was interrupted. With --nproc, each run has several ranks.
    """
    parser = argparse.ArgumentParser("forge-run compare", description=command.__doc__)
    add = parser.add_argument
    add("--set", action="append", default=[], metavar="KEY=A,B", help="values to try for a key; may come several times")
    add("--out", required=True, metavar="DIR", help="folder for runs, logs, table and picture")
    add("--nproc", type=int, default=1, metavar="N", help="ranks of each run (1)")
    options, files, overrides = parse_job_arguments(parser, argv, "jobs to compare, each in a file of its own")
    from forge_plugin_curves.compare.grid import check_jobs, trials_of
    from forge_plugin_curves.compare.results import rows_of

    out = Path(options.out)
    trials = trials_of([Path(file) for file in files], options.set, overrides, out / "runs")
    check_jobs(trials, options.nproc)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    try:
        outcomes = [_run(trial, number, len(trials), out, options.nproc) for number, trial in enumerate(trials, 1)]
    except KeyboardInterrupt:
        print("interrupted; the same command continues it", file=sys.stderr)
        return ExitCode.SECOND_SIGNAL
    rows, failed = rows_of(outcomes), [outcome for outcome in outcomes if outcome.failure]
    if rows:
        _write(rows, failed, out)
    if failed:
        names = ", ".join(outcome.trial.name for outcome in failed)
        raise ForgeError(f"{len(failed)} of {len(trials)} runs failed: {names}; see {out / 'logs'}")
    return ExitCode.FINISHED


def _run(trial: Trial, number: int, count: int, out: Path, ranks: int) -> Outcome:
    """Run a trial to its end, or continue it."""
    from forge_plugin_curves.compare.results import read_outcome

    begin = time.monotonic()
    print(f"{number}/{count}  {trial.cell.label}{f', seed {trial.seed}' if trial.seed else ''}", end="", flush=True)
    arguments = [sys.executable, "-m", "forge_core", "run", str(trial.cell.job), *trial.overrides]
    arguments += ["--nproc", str(ranks)] if ranks > 1 else []
    with (out / "logs" / f"{trial.name}.log").open("wb") as log:
        run = subprocess.run(arguments, check=False, stdout=log, stderr=subprocess.STDOUT, env=_environment())
        code = run.returncode
    if code == ExitCode.STOPPED:
        raise KeyboardInterrupt
    failure = "" if code == 0 else f"exit code {code}"
    outcome = read_outcome(trial, out / "runs" / trial.name, failure)
    held_out = f"  held out {outcome.held_out:.4f}" if outcome.evaluations else ""
    result = failure or f"loss {outcome.loss:.4f}{held_out}"
    print(f"  {result}  {time.monotonic() - begin:.0f} s", flush=True)
    return outcome


def _environment() -> dict[str, str]:
    """Returns the environment without the variables of a rank: a run is not a rank of this command's own launcher."""
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def _write(rows: Sequence, failed: Sequence[Outcome], out: Path) -> None:
    from forge_plugin_curves.compare.picture import draw
    from forge_plugin_curves.compare.results import as_markdown

    logs = {outcome.trial.name: out / "logs" / f"{outcome.trial.name}.log" for outcome in failed}
    table = as_markdown(rows, failed, logs)
    (out / "comparison.md").write_text(table + "\n")
    draw(rows, out / "comparison.png")
    print(f"\n{table}\n\n{out / 'comparison.png'}")
