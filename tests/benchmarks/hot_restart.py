"""Measures how long a run is away after a rank was killed, with and without spare processes.

    python tests/benchmarks/hot_restart.py --repeats 3

A toy model on two ranks under `forge-run launch elastic`; rank 1 is killed after 40 steps. Away: seconds from there
until the next step of the new ranks ends. Memory: proportional set size of the spare processes that wait. Prints
medians.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from forge_testing import TINY_JOB

HOOK = '''
import os
import time
from collections.abc import Callable
from pathlib import Path

from attrs import define
from forge_core import TrainingHook


@define(kw_only=True, slots=False)
class Steady(TrainingHook):
    """Each step takes 0.2 s, and is noted."""

    def on_step_end(self, context):
        time.sleep(0.2)
        Path(f"step-{os.environ['RANK']}").write_text(f"{context.step} {os.getpid()} {time.time()}")
'''
LIMIT_S = 300.0


def main() -> None:
    """Run one command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    away: dict[str, list[float]] = {"cold": [], "hot": []}
    memory: list[float] = []
    for _ in range(options.repeats):
        for kind in away:  # in turns, so that a busy machine is busy for both
            seconds, megabytes = trial(kind == "hot")
            away[kind].append(seconds)
            memory += [megabytes] if megabytes else []
    for kind, seconds in away.items():
        print(f"{kind}: away for {statistics.median(seconds):.1f} s ({', '.join(f'{one:.1f}' for one in seconds)})")
    print(f"two spare processes: {statistics.median(memory):.0f} MB")


def trial(hot: bool) -> tuple[float, float]:
    """Seconds until the run goes on, and megabytes of the spare processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.toml").write_text(f'[job]\nname = "tiny"\n{TINY_JOB}[checkpoint]\ninterval = 10\n')
        (folder / "steady.py").write_text(HOOK)
        command = [sys.executable, "-m", "forge_core", "launch", "elastic", "job.toml", "--train.steps=100000", "-q"]
        command += ["--hooks.steady.type=./steady.py:Steady", "--nproc=2", *["--hot"] * hot]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.DEVNULL)
        try:
            await_step(folder, lambda step, pid: step >= 40)
            time.sleep(10)  # spare processes have been made meanwhile
            megabytes = sum(map(proportional_mb, spares(process.pid)))
            old = position(folder)[1]
            began = time.time()
            os.kill(old, signal.SIGKILL)
            return await_step(folder, lambda step, pid: pid != old) - began, megabytes
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def position(folder: Path) -> tuple[int, int, float]:
    """Last step of rank 1, its process, and when."""
    try:
        step, pid, when = (folder / "step-1").read_text().split()
        return int(step), int(pid), float(when)
    except (OSError, ValueError):
        return 0, 0, 0.0


def await_step(folder: Path, condition: Callable[[int, int], bool]) -> float:
    """When rank 1 had made a step that meets a condition."""
    deadline = time.time() + LIMIT_S
    while time.time() < deadline:
        step, pid, when = position(folder)
        if pid and condition(step, pid):
            return when
        time.sleep(0.02)
    raise SystemExit("the run does not go on")


def spares(launcher: int) -> list[int]:
    """The spare processes of a launcher."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    tasks = [path.read_text().split() for path in Path(f"/proc/{launcher}/task").glob("*/children")]
    every = {int(pid) for pids in [children, *tasks] for pid in pids}
    return [pid for pid in every if b"forge_plugin_launch.spares" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def proportional_mb(pid: int) -> float:
    """Memory of a process, that which it shares divided among those that share it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    main()
