"""The mixture of experts of configs/moe.toml and the dense model of equal active parameters: a table and a picture.

    python tests/benchmarks/moe_against_dense.py --out runs/moe-against-dense

Both have the same learning rates to choose from. The one with the lowest held-out loss in one run then runs with three
other seeds. All see the same tokens in the same order. The program goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

CONFIG = Path(__file__).parents[2] / "configs/moe.toml"
RATES, TUNING_SEED, SEEDS = (1.5e-3, 3e-3, 6e-3), 10, (1, 2, 3)


def write_job(name: str, folder: Path, lr: float) -> Path:
    text, number = re.subn(r"^lr = .*", f"lr = {lr}", CONFIG.read_text(), flags=re.MULTILINE)
    assert number == 1
    if name == "dense":
        text, number = re.subn(r"\[model\.ffn\].*?(?=\n# Every)", "[model.ffn]\nhidden = 384\n", text, flags=re.DOTALL)
        assert number == 1
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def compare(out: Path, *arguments: object) -> str:
    """Run `forge-run compare`; gives the first, best row of its table."""
    command = [sys.executable, "-m", "forge_core", "compare", "--out", str(out), *map(str, arguments)]
    subprocess.run(command, check=True)
    return next(line for line in (out / "comparison.md").read_text().splitlines()[2:] if line.startswith("|"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    jobs, tuned = out / "jobs", []
    jobs.mkdir(parents=True, exist_ok=True)
    for name in ("dense", "experts"):
        job = write_job(name, jobs, RATES[0])
        best = compare(
            out / "tuning" / name, job, f"--set=optimizer.lr={','.join(map(str, RATES))}", f"--job.seed={TUNING_SEED}"
        )
        tuned.append(write_job(name, jobs, float(best.split()[2])))
    compare(out / "best", *tuned, f"--set=job.seed={','.join(map(str, SEEDS))}")


if __name__ == "__main__":
    main()
