"""`forge-run runs`: the runs below a folder, one line each."""

from __future__ import annotations

import argparse
import fnmatch
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_core.cli.command_line import positive, with_examples
from forge_core.contracts.errors import ExitCode, JobError
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import COUNT, FLAG, NUMBER, SECONDS, TEXT, Schema, array, by_name, keyed, maybe
from forge_plugin_runs.facts import STATES, RunFacts, find_runs, read_run
from forge_plugin_runs.words import age_text, count_text, fitted, size_text, width

HEAD = ("RUN", "STATE", "STEP", "LOSS", "HELD OUT", "TOKENS", "UPDATED", "SIZE")
EXPENDABLE = (7, 5, 6, 4)
"""Columns that a narrow terminal does without, the first first."""
STYLES = {"running": "green", "alive": "green", "late": "yellow", "silent": "red", "died": "red", "stopped": "yellow"}

SORTS: Mapping[str, Callable[[RunFacts], Any]] = {
    "updated": lambda run: -run.updated,
    "name": lambda run: str(run.folder),
    "step": lambda run: -run.step,
    "loss": lambda run: _rank(run.loss),
    "held-out": lambda run: _rank(run.held_out),
    "size": lambda run: -run.size,
}

HEADING = "watch"


def _rank(loss: float | None) -> float:
    """Smallest first; runs without a loss, or with NaN, which compare with nothing, come last."""
    return math.inf if loss is None or math.isnan(loss) else loss


def command(argv: list[str]) -> int:
    """List the runs below a folder: state, step, loss, age, size."""
    parser = argparse.ArgumentParser("forge-run runs", description=command.__doc__)
    add = parser.add_argument
    add("folders", nargs="*", type=Path, metavar="FOLDER", help="where to search (runs)")
    states = f"only runs in this state, of {', '.join(STATES)}; repeat it for more"
    add("--state", action="append", choices=list(STATES), metavar="STATE", help=states)
    add("--name", metavar="GLOB", help="only runs whose folder's name matches: 'muon-*'")
    order = f"newest, largest or best first: by {', '.join(SORTS)} (updated)"
    add("--sort", choices=list(SORTS), default="updated", metavar="FACT", help=order)
    add("--limit", type=positive, metavar="N", help="only the first N")
    add_json(parser)
    with_examples(parser, "forge-run runs", "forge-run runs compared --sort held-out", "forge-run runs --state running")
    options = parser.parse_args(argv)
    runs = select(options.folders, options.state, options.name)
    runs = sorted(runs, key=SORTS[options.sort])[: options.limit]
    if options.json:
        print_json([run.facts() for run in runs])
    else:
        show(runs, options.folders)
    return ExitCode.FINISHED


def select(folders: Sequence[Path], states: Sequence[str] | None = None, name: str | None = None) -> list[RunFacts]:
    """Returns the runs below these folders, or below `runs`, that have one of the states and match the name.

    Raises:
        JobError: one of the folders does not exist.
    """
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise JobError(f"forge-run runs: there is no folder {', '.join(map(str, missing))}")
    # A run below two of the folders is listed once
    found = dict.fromkeys(run for folder in folders or [Path("runs")] for run in find_runs_of(folder))
    named = (folder for folder in found if name is None or fnmatch.fnmatch(folder.name, name))
    return [run for run in map(read_run, named) if not states or run.state in states]


def find_runs_of(folder: Path) -> Iterable[Path]:
    """Returns the run folders below a folder; none if it does not exist."""
    return find_runs(folder) if folder.is_dir() else ()


def show(runs: Sequence[RunFacts], folders: Sequence[Path]) -> None:
    """Print a table, coloured on a terminal, and below it what could not be read."""
    if not runs:
        print(f"no runs in {', '.join(map(str, folders)) or 'runs'}")
        return
    head, *lines = fitted([HEAD, *(_cells(run, time.time()) for run in runs)], EXPENDABLE, width())
    if sys.stdout.isatty():
        from rich.console import Console

        console = Console(highlight=False)
        console.print(head, style="bold", markup=False, soft_wrap=True)
        for run, line in zip(runs, lines, strict=True):
            style = STYLES.get(run.pulse.life if run.pulse else run.state)
            console.print(line, style=style, markup=False, soft_wrap=True)
    else:
        print(head, *lines, sep="\n")
    for run in runs:
        if run.state == "running":
            print(f"{run.folder}: {run.owner}")
        elif run.end is not None and run.end.reason:
            print(f"{run.folder}: {run.end.cause}, exit code {run.end.code}: {run.end.reason}")
        if run.problem:
            # To standard error, so that a script that reads the table is not disturbed
            print(f"{run.folder}: {run.problem}", file=sys.stderr)


def _cells(run: RunFacts, now: float) -> list[str]:
    step = f"{run.step:,}" + (f" of {run.steps:,}" if run.steps is not None else "")
    losses = ["" if value is None else f"{value:.4f}" for value in (run.loss, run.held_out)]
    age = f"{age_text(now - run.updated)} ago"
    state = f"{run.state}, {run.pulse}" if run.pulse and run.pulse.life != "alive" else run.state
    return [str(run.folder), state, step, *losses, count_text(run.tokens), age, size_text(run.size)]


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    return {"": array(keyed(**run_keys(), checkpoints=array(COUNT)))}


def run_keys() -> Mapping[str, Schema]:
    """Returns the schemas of the keys of a run that `runs` and `show` print, without its checkpoints."""
    # As `forge_core.contracts.run_end.End` writes it
    end = keyed(
        code={"type": "integer"},
        cause=TEXT,
        reason=TEXT,
        final=FLAG,
        signal=TEXT,
        step=maybe(COUNT),
        rank=COUNT,
        host=TEXT,
        attempt=TEXT,
        started=maybe(SECONDS),
        ended=SECONDS,
    )
    return {
        "run": TEXT,
        "state": TEXT,
        "life": maybe(TEXT),
        "last_line_s": maybe(SECONDS),
        "step_s": maybe(SECONDS),
        "owner": TEXT,
        "step": maybe(COUNT),
        "steps": maybe(COUNT),
        "loss": maybe(NUMBER),
        "held_out_loss": maybe(NUMBER),
        "evaluation": maybe(by_name(NUMBER)),
        "evaluated": maybe(COUNT),
        "tokens": maybe(COUNT),
        "updated": maybe(SECONDS),
        "size": COUNT,
        "ended": TEXT,
        "end": maybe(end),
        "problem": TEXT,
    }
