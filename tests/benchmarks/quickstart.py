"""A plain loop and two jobs on the same text, in held-out bits per byte: a tokenizer cannot flatter those.

    python tests/benchmarks/quickstart.py
    python tests/benchmarks/quickstart.py --only quickstart

`adamw` is quickstart_adamw.toml, the quickstart until 2026-11-28: AdamW in bf16 and a model of about the plain loop's
size, so that it shows what the engine and its defaults are worth. `quickstart` is configs/quickstart.toml, on two
ranks: another model, optimizer and length for about the same time.

The plain loop (plain_loop.py): 5.9M parameters (dim 256, 6 layers, tied table), BPE of 4096, sequences of 256, batch
16, AdamW at 2e-3 with a short warm-up and a cosine, bf16, 400 steps. All train on the training part of the split by
the standard held-out list and are measured on all of its held-out part. The plain loop reads Forge's token files,
but draws its batches itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BATCH = 16
JOBS = {"adamw": (HERE / "quickstart_adamw.toml",), "quickstart": (ROOT / "configs/quickstart.toml", "--nproc=2")}
"""Arguments of `forge-run` by name."""


def plain(steps: int) -> dict[str, float]:
    import torch
    from plain_loop import LanguageModel, precision
    from torch import nn

    train, held_out, bytes_per_token, vocabulary = token_data()
    torch.manual_seed(0)
    length = train[0]["input_ids"].shape[0]
    sizes = {"vocab": vocabulary, "dim": 256, "layers": 6, "heads": 8, "kv_heads": 8, "hidden": 704}
    model = LanguageModel(**sizes, length=length, bf16=True, tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    order = torch.randperm(len(train)).tolist()
    began = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * rate(step, steps)
        ids, labels = stack([train[i] for i in order[step * BATCH : (step + 1) * BATCH]])
        with precision(True):
            loss = model(ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - began
    nats = evaluate(model, held_out)
    bits = nats / math.log(2) / bytes_per_token
    return {
        "nats": nats,
        "bits_per_byte": bits,
        "seconds": seconds,
        "params": sum(p.numel() for p in model.parameters()),
    }


def rate(step: int, steps: int) -> float:
    """Twenty steps of warm-up, then a cosine to a tenth."""
    if step < 20:
        return (step + 1) / 20
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 20) / (steps - 20)))


def token_data():
    """(training sequences, held-out sequences, bytes a held-out token, vocabulary) of the split by the standard
    held-out list, with a BPE of 4096 trained on its training part."""
    from forge_core import load_job
    from forge_core.engine.build import build_context, build_datasets, build_tokenizer
    from forge_core.plugins.catalog import Catalog

    overrides = ["--train.seq_len=256", "--data.tokenizer.vocab_size=4096"]
    job = load_job(HERE / "quickstart_adamw.toml", overrides=overrides)
    context = build_context(job, Catalog.installed(), None)
    import attrs

    tokenizer = build_tokenizer(job, context)
    (dataset,) = build_datasets(job, attrs.evolve(context, tokenizer=tokenizer))
    return dataset, dataset.held_out, dataset.bytes_per_token, tokenizer.vocab_size


def stack(samples):
    import torch

    return tuple(
        torch.stack([torch.as_tensor(s[name].astype("int64")) for s in samples]) for name in ("input_ids", "labels")
    )


def evaluate(model, held_out) -> float:
    """Mean nats over all held-out tokens."""
    import torch
    from plain_loop import precision

    total = tokens = 0.0
    with torch.no_grad(), precision(True):
        for start in range(0, len(held_out), BATCH):
            ids, labels = stack([held_out[i] for i in range(start, min(start + BATCH, len(held_out)))])
            count = (labels != -100).sum().item()
            total += model(ids, labels).item() * count
            tokens += count
    return total / tokens


def forge(name: str, overrides: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        # Both jobs name their run; the folder of the run is to be found without reading them
        named = [f"--job.output={folder}", "--job.name=run"]
        command = [sys.executable, "-m", "forge_core", *map(str, JOBS[name]), *named, *overrides]
        began = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
        seconds = time.perf_counter() - began
        lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
        last = json.loads([line for line in lines if "eval/loss" in line][-1])
    return {"nats": last["eval/loss"], "bits_per_byte": last["eval/bits_per_byte"], "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain-steps", type=int, default=400)
    parser.add_argument("--only", choices=["plain", *JOBS])
    options, overrides = parser.parse_known_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.path.insert(0, str(HERE))
    rows = {}
    if options.only in (None, "plain"):
        rows["plain loop"] = plain(options.plain_steps)
        print(rows, flush=True)
    for name in JOBS:
        if options.only in (None, name):
            rows[name] = forge(name, overrides)
    print("| | nats a token | bits per byte | seconds |\n|---|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {row['nats']:.3f} | {row['bits_per_byte']:.4f} | {row['seconds']:.0f} |")
    if "plain loop" in rows:
        for name, row in rows.items():
            ratio = row["bits_per_byte"] / rows["plain loop"]["bits_per_byte"]
            print(f"{name} / plain loop: {ratio:.3f} of the bits per byte")


if __name__ == "__main__":
    main()
