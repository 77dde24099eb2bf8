"""CPU and wall time of commands that a user waits for, each in a process of its own: python tests/benchmarks/startup.py

The job is a tiny one in a temporary folder, with a run in it. Commands take turns, so that what the machine does
besides spreads over all of them; the medians of `--repeats` go into a table.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOB = """
[job]
name = "tiny"
[train]
steps = 2
global_batch_size = 8
seq_len = 32
[model]
type = "transformer"
dim = 32
layers = 1
[data.tokenizer]
type = "bytes"
[[data.sources]]
type = "text"
path = "text"
held_out_every = 4
[optimizer]
type = "adamw"
"""
COMMANDS = (
    "--version",
    "--help",
    "check job.toml",
    "check job.toml --model.layerz=2",
    "explain optimizer.adamw",
    "runs",
    "show runs/tiny",
    "checkpoints runs/tiny",
    "plugins",
    "explain schema",
    "plan job.toml --world-size 8 --gpu h100",
    "job.toml",
)


def measure(command: str, folder: Path) -> tuple[float, float]:
    """CPU seconds (user and system, children included) and wall seconds of one command."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = os.environ | {"FORGE_CACHE": str(folder / "cache"), "OMP_WAIT_POLICY": "passive"}
    line = [sys.executable, "-m", "forge_core", *command.split()]
    subprocess.run(line, cwd=folder, env=environment, capture_output=True, check=False)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.toml").write_text(JOB)
        (folder / "text").mkdir()
        for number in range(8):
            (folder / f"text/{number}.txt").write_text(f"file {number} says " + "hello " * 30)
        for command in COMMANDS:  # compiles what is imported, and makes the run that later ones look at
            measure(command, folder)
        rounds = [[measure(command, folder) for command in COMMANDS] for _ in range(options.repeats)]
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, medians of {options.repeats}\n")
    print("| `forge-run …` | CPU seconds | wall seconds |\n|---|---|---|")
    for command, results in zip(COMMANDS, zip(*rounds, strict=True), strict=True):
        cpu, wall = (statistics.median(each) for each in zip(*results, strict=True))
        print(f"| `{command}` | {cpu:.2f} | {wall:.2f} |")


if __name__ == "__main__":
    main()
