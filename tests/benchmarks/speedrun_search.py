"""The search behind configs/speedrun.toml: settings of equal cost, on files set aside from its training files.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive python tests/benchmarks/speedrun_search.py --out runs/speedrun-search
    python tests/benchmarks/speedrun_search.py --out runs/speedrun-search --only width

Files of the standard held-out list take no part: they are left out of the corpus, and every 20th of the other
files is held out in their place. A trial has about a quarter of the speedrun's time, 105 s of one core, and its
schedule is scaled to it. Time is not measured but counted, so that other work on the machine changes nothing:
`milliseconds` are CPU time of a step of each shape on one thread, taken in turns on an AMD EPYC with AVX512-BF16 (Zen
5), and a trial has the steps that this time pays for. `forge-run compare` runs the trials of a round and writes a
table; it continues where it was interrupted. Rounds build on each other: the best of one is the base of the next.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from attrs import frozen

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ALL = {
    "train.precision": '"bf16"',
    "train.seq_len": "256",
    "train.global_batch_size": "8",
    "model.type": '"transformer"',
    "model.layers": "4",
    "model.tie_embeddings": "true",
    "model.attention.qk_norm": "true",
    "data.tokenizer.type": '"bpe"',
    "data.tokenizer.vocab_size": "4096",
    "loss.type": '"chunked_cross_entropy"',
    "optimizer.type": '"muon"',
    "optimizer.lr": "0.03",
    "optimizer.adam_lr": "6e-3",
    "scheduler.type": '"wsd"',
    "plugins.cpu_products": "{}",
}
"""What trials share unless they say otherwise."""


def width(dim: int, hidden: int, heads: int, kv_heads: int, head_dim: int = 64) -> dict[str, str]:
    sizes = {"dim": dim, "ffn.hidden": hidden, "attention.heads": heads, "attention.kv_heads": kv_heads}
    return {f"model.{key}": str(value) for key, value in {**sizes, "attention.head_dim": head_dim}.items()}


SQRT = {"scheduler.shape": '"sqrt"', "scheduler.decay_fraction": "0.6"}
LINEAR = {"scheduler.shape": '"linear"', "scheduler.decay_fraction": "0.9"}
HALF = {"train.global_batch_size": "4"}
FEW = {"optimizer.ns_steps": "3"}
THREE = {"model.layers": "3", "optimizer.ns_steps": "5"}
W288_32 = {**width(288, 768, 9, 3, 32), **SQRT}
"""The best by hand before the search."""
W288 = {**width(288, 768, 4, 2), **SQRT}
W192, W160, W128, W96 = (
    {**sizes, **LINEAR, **FEW}
    for sizes in (
        width(192, 512, 3, 1),
        width(160, 448, 2, 1),
        width(128, 384, 2, 1),
        width(96, 256, 2, 1),
    )
)


@frozen
class Trial:
    """Some keys, and what they cost."""

    steps: int
    milliseconds: float
    """CPU time of a step."""
    keys: dict[str, str]


ADAMW = {"optimizer.type": '"adamw"', "optimizer.lr": "6e-3", "optimizer.adam_lr": "", "optimizer.ns_steps": ""}
"""An empty value leaves a key out."""
ROUNDS: dict[str, dict[str, Trial]] = {
    "heads and batch": {
        "heads of 32": Trial(300, 350, W288_32),
        "heads of 64": Trial(300, 335, W288),
        "sequences of 512": Trial(300, 390, {**W288_32, "train.seq_len": "512", **HALF}),
        "batches of 4": Trial(600, 205, {**W288_32, **HALF}),
    },
    "rates, 288 wide": {
        "adam_lr 0.012": Trial(300, 335, {**W288, "optimizer.adam_lr": "0.012"}),
        "scores doubled": Trial(300, 335, {**W288, "model.attention.scale": "0.25"}),
    },
    "width": {
        "288, batches of 4": Trial(600, 175, {**W288, **LINEAR, **FEW, **HALF}),
        "192, batches of 4": Trial(1000, 107, {**W192, **HALF}),
        "192": Trial(600, 180, W192),
        "128": Trial(850, 122, W128),
        "96": Trial(1165, 88, W96),
    },
    "vocabulary": {"192, 2048 tokens": Trial(845, 165, {**W192, "data.tokenizer.vocab_size": "2048"})},
    "rates": {
        "192, adam_lr 0.012": Trial(600, 180, {**W192, "optimizer.adam_lr": "0.012"}),
        "128, adam_lr 0.012": Trial(850, 122, {**W128, "optimizer.adam_lr": "0.012"}),
        "128, lr 0.02": Trial(850, 122, {**W128, "optimizer.lr": "0.02"}),
        "96, adam_lr 0.004": Trial(1165, 88, {**W96, "optimizer.adam_lr": "0.004"}),
        "96, lr 0.045": Trial(1165, 88, {**W96, "optimizer.lr": "0.045"}),
    },
    "shape": {
        "96, sequences of 128": Trial(1165, 86, {**W96, "train.seq_len": "128", "train.global_batch_size": "16"}),
        "96, head untied": Trial(1165, 90, {**W96, "model.tie_embeddings": "false"}),
        "96, six layers": Trial(910, 115, {**W96, "model.layers": "6"}),
    },
    "what two parts gave": {
        "96, five steps of Newton-Schulz": Trial(1120, 92, {**W96, "optimizer.ns_steps": "5"}),
        "96, AdamW": Trial(1230, 83, {**W96, **ADAMW}),
    },
    "three layers": {
        "96, three layers": Trial(1390, 74, {**W96, **THREE}),
        "128, three layers": Trial(1050, 98, {**W128, **THREE}),
    },
    "whole length": {
        "160": Trial(3250, 140, {**W160, "optimizer.adam_lr": "0.008"}),
        "128, three layers, whole length": Trial(3000, 150, {**W128, **THREE}),
    },
}


def corpus(folder: Path) -> Path:
    """Copy the training files of the committed split."""
    from forge_plugin_text.python_stdlib import PythonStdlib

    listed = (ROOT / "plugins/forge-plugin-text/forge_plugin_text/python_stdlib.heldout.txt").read_text().splitlines()
    held_out = {line.strip() for line in listed if not line.startswith("#")}
    for file in PythonStdlib().files():
        if file.name not in held_out:
            copy = folder / file.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.path, copy)
    return folder


def write_job(path: Path, text: Path, trial: Trial) -> Path:
    """A job file of keys with dots, which TOML reads as tables."""
    source = f'data.sources = [{{ type = "text", path = "{text}", held_out_every = 20 }}]'
    keys = {**ALL, **trial.keys, "train.steps": str(trial.steps), "scheduler.warmup_steps": str(trial.steps // 30)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([source, *(f"{key} = {value}" for key, value in keys.items() if value)]) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=list(ROUNDS), choices=list(ROUNDS), metavar="ROUND")
    options, overrides = parser.parse_known_args()
    out = options.out.resolve()
    text = corpus(out / "corpus")
    for name in options.only:
        jobs = [write_job(out / "jobs" / name / f"{trial}.toml", text, what) for trial, what in ROUNDS[name].items()]
        command = [sys.executable, "-m", "forge_core", "compare", *map(str, jobs), "--out", str(out / name), *overrides]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
