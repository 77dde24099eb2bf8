"""AdamW, Muon and SOAP on one ladder, each tuned at every size, compared at the end of training.

    python tests/benchmarks/optimizer_ladder.py OUT            # about 40 minutes of one slow core

Three ladders over `configs/rung.toml`: sizes of 10 and 20 thousand parameters, 50 tokens for each parameter, three
rates a factor of 2.5 apart, each with a whole cosine. The table has the best held-out loss of each size and its rate:
Wen et al. 2025 (arXiv 2509.02046) compare optimizers so, tuned at each size and judged at the end of training.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from forge_plugin_ladder import read_points
from forge_plugin_ladder.tuning import best_points

ROOT = Path(__file__).parents[2]
LADDER = """
job = "job.toml"
output = "{out}"
[sizes.10k]
dim = 16
attention.heads = 2
ffn.hidden = 48
[sizes.20k]
dim = 24
attention.heads = 3
ffn.hidden = 64
[budgets]
tokens_per_parameter = [50]
[tune]
"optimizer.lr" = [0.4, 1, 2.5]
[rules."scheduler.warmup_steps"]
type = "power"
at_reference = 1
tokens = 10_240
by_tokens = 1
"""
# Middle rates, after a first try of AdamW at 8e-3, whose best rate was the largest
RATES = {"adamw": 2e-2, "muon": 2e-2, "soap": 1e-2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parallel", default="1", help="runs at the same time")
    options = parser.parse_args()
    best: dict[str, dict[float, str]] = {}
    for name, rate in RATES.items():
        folder = options.out / name
        folder.mkdir(parents=True, exist_ok=True)
        job = (ROOT / "configs/rung.toml").read_text()
        job = job.replace('type = "adamw"\nlr = 5e-3', f'type = "{name}"\nlr = {rate}')
        (folder / "job.toml").write_text(job)
        (folder / "ladder.toml").write_text(LADDER.format(out=folder / "runs"))
        command = [sys.executable, "-m", "forge_core", "ladder", "run", str(folder / "ladder.toml")]
        subprocess.run([*command, "--parallel", options.parallel], check=True)
        points = best_points(read_points(folder / "runs/points.json"))
        best[name] = {point.parameters: f"{point.loss:.4f} at {point.tuned['optimizer.lr']:.3g}" for point in points}
    for size in best["adamw"]:
        print(f"{size:8,.0f}", *(f"{name} {found[size]}" for name, found in best.items()), sep="  ")


if __name__ == "__main__":
    main()
