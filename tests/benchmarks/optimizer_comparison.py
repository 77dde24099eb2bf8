"""Every optimizer on the quickstart's text, with the same tuning budget: a table and a picture.

    python tests/benchmarks/optimizer_comparison.py --out runs/optimizers

Each has five learning rates to choose from, a factor of three apart around a usual one for small models, and all else
at its defaults. Optimizers that leave embeddings and norms to AdamW then choose the rate of those, `adam_lr`,
likewise, from three around AdamW's best one. The rates with the lowest held-out loss in one run then run with three
other seeds. All see the same tokens in the same order. Rates decay to a tenth along a cosine after a tenth of warm-
up, but for the Schedule-Free optimizers, which have the same warm-up and no decay. The program continues where it was
interrupted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

BASE = """\
[train]
steps = 800
global_batch_size = 8
seq_len = 128
precision = "fp32"

[model]
type = "transformer"
dim = 64
layers = 2
tie_embeddings = true
[model.attention]
heads = 4
qk_norm = true
[model.ffn]
hidden = 192

[[data.sources]]
type = "python_stdlib"
held_out_list = "standard"
[data.tokenizer]
type = "bpe"
vocab_size = 1024

[loss]
type = "chunked_cross_entropy"

[eval]
interval = 400
[evaluations.held_out]
sequences = 128
"""
COSINE = '[scheduler]\ntype = "cosine"\nwarmup_steps = 80\nmin_ratio = 0.1\n'
TUNING_SEED, SEEDS = 10, (1, 2, 3)
OPTIMIZERS = {
    "AdamW": ('type = "adamw"', 3e-3, COSINE),
    "AdamW, 8-bit": ('type = "adamw_8bit"\ncompile = false', 3e-3, COSINE),
    "AdamW, 4-bit": ('type = "adamw_4bit"\ncompile = false', 3e-3, COSINE),
    "AdamW, float8": ('type = "adamw_float8"\ncompile = false', 3e-3, COSINE),
    "AdamW, bf16 moments": ('type = "adamw_bf16"\ncompile = false', 3e-3, COSINE),
    "AdamW, bf16 parameters": ('type = "adamw_bf16"\nparameter_dtype = "bf16"\ncompile = false', 3e-3, COSINE),
    "AdamW + EMA": ('type = "adamw"\n[plugins.ema]\ndecay = 0.98', 3e-3, COSINE),
    "Lion": ('type = "lion"', 3e-3, COSINE),
    "Lion, cautious": ('type = "lion"\ncautious = true', 3e-3, COSINE),
    "Muon": ('type = "muon"', 2e-2, COSINE),
    "SOAP": ('type = "soap"', 3e-3, COSINE),
    "Schedule-Free AdamW": ('type = "schedule_free_adamw"\nwarmup_steps = 80', 1e-2, ""),
    "Schedule-Free SGD": ('type = "schedule_free_sgd"\nwarmup_steps = 80', 3.0, ""),
}
"""By name: its table, the middle one of its learning rates, and its schedule."""


USE_ADAMW = ("Muon", "SOAP")
ADAM_RATES = (1e-3, 3e-3, 9e-3)


def rates(middle: float) -> Iterator[float]:
    """What is tried."""
    return (float(f"{middle * factor:.3g}") for factor in (1 / 9, 1 / 3, 1, 3, 9))


def write_job(name: str, folder: Path, lr: float, adam_lr: float | None = None) -> Path:
    table, _, schedule = OPTIMIZERS[name]
    path = folder / f"{name}.toml"
    second = "" if adam_lr is None else f"adam_lr = {adam_lr}\n"
    path.write_text(f"{BASE}\n{schedule}\n[optimizer]\nlr = {lr}\n{second}{table}\n")
    return path


def compare(out: Path, *arguments: object) -> list[str]:
    """Run `forge-run compare`; returns the rows of its table."""
    command = [sys.executable, "-m", "forge_core", "compare", "--out", str(out), *map(str, arguments)]
    subprocess.run(command, check=True)
    return [line for line in (out / "comparison.md").read_text().splitlines()[2:] if line.startswith("|")]


def best_of(rows: list[str]) -> float:
    """The value in the first row, which is the best one."""
    return float(rows[0].split()[2])


def marked(tried: Iterable[float], best: float) -> str:
    return ", ".join(f"**{rate:g}**" if rate == best else f"{rate:g}" for rate in tried)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    arguments = parser.parse_args()
    jobs, chosen = arguments.out / "jobs", {}
    jobs.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        tried = ",".join(map(str, rates(OPTIMIZERS[name][1])))
        folder = arguments.out / "tuning" / name
        adam_lr = ADAM_RATES[1] if name in USE_ADAMW else None
        job = write_job(name, jobs, OPTIMIZERS[name][1], adam_lr)
        lr = best_of(compare(folder, job, f"--set=optimizer.lr={tried}", f"--job.seed={TUNING_SEED}"))
        if name in USE_ADAMW:
            job, tried = write_job(name, jobs, lr, adam_lr), ",".join(map(str, ADAM_RATES))
            rows = compare(folder / "adam_lr", job, f"--set=optimizer.adam_lr={tried}", f"--job.seed={TUNING_SEED}")
            adam_lr = best_of(rows)
        chosen[name] = (lr, adam_lr)
    tuned = [write_job(name, jobs, *both) for name, both in chosen.items()]
    compare(arguments.out / "best", *tuned, f"--set=job.seed={','.join(map(str, SEEDS))}")
    print("\n| | learning rates, the best one bold |\n|---|---|")
    for name, (lr, adam_lr) in chosen.items():
        line = marked(rates(OPTIMIZERS[name][1]), lr)
        print(f"| {name} | {line}{f'; adam_lr {marked(ADAM_RATES, adam_lr)}' if adam_lr else ''} |")


if __name__ == "__main__":
    main()
