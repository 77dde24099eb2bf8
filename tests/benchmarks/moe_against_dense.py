"""The mixture of experts of configs/moe.toml and the dense model of equal active parameters: a table and a picture.

    python tests/benchmarks/moe_against_dense.py --out runs/moe-against-dense

Both have the same learning rates to choose from, and the same seeds at each: rounding alone moves a run by as much
as they differ, so that a single one tells nothing. Those of one seed see the same tokens in the same order.
The program continues where it was interrupted.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

CONFIG = Path(__file__).parents[2] / "configs/moe.toml"
RATES, SEEDS = (3e-3, 6e-3), (1, 2, 3)


def write_jobs(folder: Path) -> list[Path]:
    """The jobs of both models, which differ in the feed-forward layers alone."""
    experts = CONFIG.read_text()
    dense, number = re.subn(r"\[model\.ffn\].*?(?=\n# Every)", "[model.ffn]\nhidden = 384\n", experts, flags=re.DOTALL)
    assert number == 1
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("dense", dense), ("experts", experts)):
        (folder / f"{name}.toml").write_text(text)
    return [folder / "dense.toml", folder / "experts.toml"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    command = [sys.executable, "-m", "forge_core", "compare", "--out", str(out), *map(str, write_jobs(out / "jobs"))]
    for key, values in (("optimizer.lr", RATES), ("job.seed", SEEDS)):
        command.append(f"--set={key}={','.join(map(str, values))}")
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
