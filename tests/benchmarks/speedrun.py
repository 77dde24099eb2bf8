"""The speedrun's job with three seeds, each from a clean state, and the plain loop that it is measured against.

    python tests/benchmarks/speedrun.py
    python tests/benchmarks/speedrun.py --job my.toml --seeds 1 2 3

Each run has an empty cache, so tokenizer and token files are made in its time, which counts from the command to its
last line. Bits per byte are of all files of configs/quickstart.heldout.txt. The plain loop (quickstart.py) is timed
over some of its steps, on the same machine, without its start; it ends at 1.794. Time to 1.794 is that of the run's
first evaluation that is no worse, from the command on.
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
PLAIN_BITS, PLAIN_STEPS = 1.794, 400
TIMED = 60
"""Steps of the plain loop that are timed."""


def measured(job: Path, seed: int, overrides: list[str]) -> dict[str, float]:
    """Run the job from a clean state."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "forge_core", str(job), f"--job.output={folder}/runs", f"--job.seed={seed}"]
        environment = {**os.environ, "FORGE_CACHE": f"{folder}/cache", "PYTHONUNBUFFERED": "1"}
        began, reached, last = time.perf_counter(), float("nan"), 0.0
        with subprocess.Popen(
            [*command, *overrides], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        ) as run:
            assert run.stdout is not None
            for line in run.stdout:
                last = time.perf_counter() - began
                print(f"{last:7.1f}  {line}", end="", flush=True)
                words = line.split()
                if reached != reached and "eval/bits_per_byte" in words:
                    bits = float(words[words.index("eval/bits_per_byte") + 1].rstrip(","))
                    reached = last if bits <= PLAIN_BITS else reached
        if run.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {run.returncode}")
        (metrics,) = Path(folder, "runs").glob("*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    final = [row for row in rows if "eval/bits_per_byte" in row][-1]
    return {"bits": final["eval/bits_per_byte"], "seconds": last, "reached": reached, "steps": final["step"]}


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
    options, overrides = parser.parse_known_args()
    rows = [measured(options.job, seed, overrides) for seed in options.seeds]
    print("\n| seed | steps | held-out bits a byte | seconds in all | seconds to 1.794 |\n|---|---|---|---|---|")
    for seed, row in zip(options.seeds, rows, strict=True):
        reached = f"{row['reached']:.0f}"
        print(f"| {seed} | {row['steps']:.0f} | {row['bits']:.4f} | {row['seconds']:.0f} | {reached} |")
    bits = [row["bits"] for row in rows]
    spread = f" ± {statistics.stdev(bits):.4f}" if len(bits) > 1 else ""
    slowest, reached = (max(row[name] for row in rows) for name in ("seconds", "reached"))
    print(f"| all | | {statistics.mean(bits):.4f}{spread} | {slowest:.0f} at most | {reached:.0f} at most |")
    if not options.without_plain:
        plain = plain_seconds()
        print(f"\nplain loop: {plain:.0f} s for {PLAIN_STEPS} steps; 1.794 was reached in {reached / plain:.2f} of it")


if __name__ == "__main__":
    main()
