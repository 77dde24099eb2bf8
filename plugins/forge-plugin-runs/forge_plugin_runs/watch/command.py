"""`forge-run watch`."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from forge_core.cli.command_line import with_examples
from forge_core.contracts.errors import ExitCode, ForgeError
from forge_plugin_runs.facts import demand_run

if TYPE_CHECKING:
    from rich.console import Console

    from forge_plugin_runs.watch.run_state import WatchedRun

REMOTE = re.compile(r"(?P<host>[^/:]+):(?P<folder>.+)")
"""As for scp: a colon before the first slash."""


HEADING = "watch"


def command(argv: list[str]) -> int:
    """Follow runs in the terminal: curves, throughput, time left.

    Runs may be on other hosts. The command also shows whether each run is alive.
    """
    parser = argparse.ArgumentParser("forge-run watch", description=command.__doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a run folder, or one of another host by ssh: host:runs/big")
    add("--curve", action="append", default=[], metavar="NAME", help="number to draw; repeat it for more (loss)")
    add("--interval", type=float, default=2.0, metavar="S", help="seconds between pictures (2)")
    add("--once", action="store_true", help="show one picture and end")
    with_examples(
        parser,
        "forge-run watch runs/quickstart",
        "forge-run watch runs/a cluster:/scratch/runs/b --curve loss --curve grad_norm",
        "forge-run watch cluster:runs/big --once",
    )
    options = parser.parse_args(argv)
    if not options.interval > 0:
        parser.error(f"--interval is {options.interval:g}; it must be above 0")
    from rich.console import Console

    console = Console(highlight=False)
    with ExitStack() as stack:
        runs = [_opened(name, options.once) for name in options.runs]
        for run in runs:
            stack.callback(run.close)
        curves = options.curve or ["loss"]
        if options.once:
            _show_once(runs, curves, console)
        else:
            _follow(runs, curves, options.interval, console)
    return ExitCode.FINISHED


def _opened(name: str, once: bool) -> WatchedRun:
    from forge_plugin_runs.watch.run_state import LocalRun, RemoteRun

    remote = REMOTE.fullmatch(name)
    # A folder of this machine may have a colon in its name
    if remote and not Path(name).exists():
        return RemoteRun(remote["host"], remote["folder"], once=once)
    return LocalRun(demand_run(Path(name)))


def _show_once(runs: Sequence[WatchedRun], curves: Sequence[str], console: Console) -> None:
    from forge_plugin_runs.watch.frame import frame

    for run in runs:
        run.poll()
    if failed := [run for run in runs if run.problem]:
        raise ForgeError("; ".join(f"{run.name}: {run.problem}" for run in failed))
    console.print(frame(runs, curves, console.width, None))


def _follow(runs: Sequence[WatchedRun], curves: Sequence[str], interval: float, console: Console) -> None:
    """Show pictures until Ctrl-C; one below the other where the output is no terminal."""
    from rich.live import Live

    from forge_plugin_runs.watch.frame import frame

    try:
        with ExitStack() as stack:
            # Without automatic refresh, which redraws unchanged pictures from another thread
            live = stack.enter_context(Live(console=console, auto_refresh=False)) if console.is_terminal else None
            while True:
                for run in runs:
                    run.poll()
                picture = frame(runs, curves, console.width, console.height if live else None)
                if live is not None:
                    live.update(picture, refresh=True)
                else:
                    console.print(picture)
                    sys.stdout.flush()
                time.sleep(interval)
    except KeyboardInterrupt:  # the usual way to end it
        return
