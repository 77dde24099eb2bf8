"""Cost of watching when nothing fails: CPU time a step of watchdogs, `goodput`, `interval` and `spikes` together.

python tests/benchmarks/vigilance.py [--steps 150] [--rounds 3]

Two ranks take steps of 100 ms, nearly all of it asleep, so that the CPU time of the processes is what a run does beside
its computing. With the watchdogs and hooks and without, in turn; the difference is the cost, of both ranks together.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STEP_S = 0.1
HOOKS = """
[hooks.goodput]
[hooks.interval]
[hooks.spikes]
warmup_steps = 0
"""
UNWATCHED = "[launch]\nhang_timeout_s = 0\nsilence_timeout_s = 0\n"
SLEEPING = f"""
import time
from attrs import define
from forge_core import TrainingHook


@define(kw_only=True, slots=False)
class Sleeping(TrainingHook):
    def on_step_begin(self, context):
        time.sleep({STEP_S})
"""


def main() -> None:
    """Measure, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="more of the longer run; the shorter one has 20")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    costs: dict[str, list[float]] = {"watched": [], "unwatched": []}
    for number in range(options.rounds):
        for name, layer in (("watched", HOOKS), ("unwatched", UNWATCHED)):
            # The difference of two lengths leaves out the start and the end of a run
            short, long = (_cpu_seconds(layer, 20 + more) for more in (0, options.steps))
            costs[name].append(1e6 * (long - short) / options.steps)
        figures = ", ".join(f"{name} {values[-1]:.0f}" for name, values in costs.items())
        print(f"round {number + 1}: {figures} us of CPU time a step of both ranks", flush=True)
    watched, unwatched = (statistics.median(costs[name]) for name in ("watched", "unwatched"))
    each = (watched - unwatched) / 2
    print(f"watching costs a rank {each:.0f} us a step of {1000 * STEP_S:.0f} ms: {each / (1e4 * STEP_S):.2f} %")


def _cpu_seconds(layer: str, steps: int) -> float:
    from forge_testing.tiny import TINY_JOB

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.toml").write_text(TINY_JOB)
        (Path(folder) / "sleeping.py").write_text(SLEEPING)
        (Path(folder) / "layer.toml").write_text(f'{layer}\n[hooks.sleeping]\ntype = "./sleeping.py:Sleeping"\n')
        command = [sys.executable, "-m", "forge_core", "job.toml", "layer.toml", f"--train.steps={steps}", "--nproc=2"]
        command += ["--checkpoint.interval=0", "--checkpoint.interval_minutes=0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
