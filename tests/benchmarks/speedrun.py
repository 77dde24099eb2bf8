"""The speedrun's job with three seeds, each from a clean state, and the plain loop that it is measured against.

    python tests/benchmarks/speedrun.py
    python tests/benchmarks/speedrun.py --job my.toml --seeds 1 2 3

Each run has an empty cache, so tokenizer and token files are made in its time, which counts from the command to its
last line. Bits per byte are of all files of the standard held-out list. The plain loop (quickstart.py) is timed
over some of its steps, on the same machine, without its start; it ends at 1.794. A short run of the job, with its
schedule scaled, shows in what share of that time 1.794 is reached, from the command to the evaluation's line.

    python tests/benchmarks/speedrun.py --fit 262

first finds by a short run how many steps take 262 s in all, and runs these.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLAIN_STEPS = 400
TIMED = 60
"""Steps of the plain loop that are timed."""
EVALUATION = 2.0
"""Seconds of an evaluation, of which a short run has one."""
SHORT = ["--train.steps=300", "--scheduler.warmup_steps=20", "--eval.interval=0"]


def measured(job: Path, seed: int, overrides: list[str]) -> dict[str, float]:
    """Run the job from a clean state."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "forge_core", str(job), "--nproc", "2", f"--job.output={folder}/runs"]
        command += [f"--job.seed={seed}", *overrides]
        environment = {**os.environ, "FORGE_CACHE": f"{folder}/cache", "PYTHONUNBUFFERED": "1"}
        began, evaluated, last = time.perf_counter(), 0.0, 0.0
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            for line in run.stdout:
                last = time.perf_counter() - began
                print(f"{last:7.1f}  {line}", end="", flush=True)
                if line.startswith("step ") and "eval/bits_per_byte" in line:
                    evaluated = last
        if run.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {run.returncode}")
        (metrics,) = Path(folder, "runs").glob("*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    final = [row for row in rows if "eval/bits_per_byte" in row][-1]
    step = statistics.median(row["step_seconds"] for row in rows if "step_seconds" in row)
    figures = {"bits": final["eval/bits_per_byte"], "seconds": last, "evaluated": evaluated, "steps": final["step"]}
    return {**figures, "step_seconds": step}


def fitting(short: dict[str, float], seconds: float) -> list[str]:
    """Overrides for as many steps as fit into a time, with five evaluations."""
    rest = short["seconds"] - short["steps"] * short["step_seconds"]
    steps = int((seconds - rest - 4 * EVALUATION) / short["step_seconds"]) // 50 * 50
    print(f"a step takes {short['step_seconds']:.4f} s, all else {rest:.1f} s: {steps} steps take {seconds:.0f} s\n")
    return [f"--train.steps={steps}", f"--eval.interval={steps // 5}"]


def plain_seconds() -> float:
    """Seconds that the plain loop takes for all its steps, by the time of some."""
    program = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
import quickstart
quickstart.evaluate = lambda model, held_out: 0.0
print(quickstart.plain({TIMED})["seconds"])
"""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "FORGE_CACHE": folder}
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
    return float(done.stdout.split()[-1]) * PLAIN_STEPS / TIMED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, default=ROOT / "configs/speedrun.toml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--without-plain", action="store_true", help="do not time the plain loop")
    parser.add_argument("--fit", type=float, metavar="SECONDS", help="as many steps as this time allows")
    options, overrides = parser.parse_known_args()
    job = options.job.resolve()
    short = measured(job, options.seeds[0], [*overrides, *SHORT])
    if options.fit:
        overrides += fitting(short, options.fit)
    rows = [measured(job, seed, overrides) for seed in options.seeds]
    print("\n| seed | steps | held-out bits a byte | seconds in all |\n|---|---|---|---|")
    for seed, row in zip(options.seeds, rows, strict=True):
        print(f"| {seed} | {row['steps']:.0f} | {row['bits']:.4f} | {row['seconds']:.0f} |")
    bits = [row["bits"] for row in rows]
    spread = f" ± {statistics.stdev(bits):.4f}" if len(bits) > 1 else ""
    print(f"| all | | {statistics.mean(bits):.4f}{spread} | {max(row['seconds'] for row in rows):.0f} at most |")
    if not options.without_plain:
        plain = plain_seconds()
        print(f"\nplain loop: {plain:.0f} s for {PLAIN_STEPS} steps, 1.794 bits a byte")
        reached = f"{short['bits']:.4f} in {short['evaluated']:.0f} s, {short['evaluated'] / plain:.2f} of that time"
        print(f"{short['steps']:.0f} steps of the job: {reached}")


if __name__ == "__main__":
    main()
