"""What loading costs: `TrainLoader` against a plain loop over the same memory map, in alternating rounds.

python tests/benchmarks/loader.py [--tokens 100000000] [--seq-len 1024] [--rows 64]

The plain loop draws random windows from the map as nanoGPT does: two slices a sequence, widened to int64 and stacked.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from attrs import frozen

from forge_core.contracts.components import DatasetComponent
from forge_core.data.loader import TrainLoader
from forge_core.engine.build import build_context, build_datasets
from forge_core.plugins.catalog import Catalog
from forge_kit.token_file import HEADER, TokenFile, TokenFileWriter
from forge_testing import tiny_job


@frozen(kw_only=True)
class Tokens(DatasetComponent):
    stem: str

    def build(self, context):
        return TokenFile(Path(self.stem))


def plain_steps(path: Path, seq_len: int, rows: int) -> Callable[[], object]:
    tokens = np.memmap(path, "<u2", mode="r", offset=HEADER.size)
    generator = np.random.default_rng(0)

    def step() -> object:
        starts = generator.integers(0, len(tokens) - seq_len - 1, rows)
        inputs = torch.stack([torch.from_numpy(tokens[i : i + seq_len].astype(np.int64)) for i in starts])
        labels = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + seq_len].astype(np.int64)) for i in starts])
        return inputs, labels

    return step


def timed(step: Callable[[], object], steps: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stem = Path(folder) / "corpus"
        with TokenFileWriter(stem, 50_000, 0) as writer:
            writer.add("random", np.random.default_rng(0).integers(1, 50_000, options.tokens))
        catalog = Catalog.installed()
        job = tiny_job(
            folder,
            catalog,
            global_batch_size=options.rows,
            seq_len=options.seq_len,
            data={"sources": (Tokens(stem=str(stem)),), "workers": options.workers},
        )
        context = build_context(job, catalog, None)
        loader = TrainLoader(job, build_datasets(job, context), context)
        steps = {
            "plain loop": plain_steps(stem.with_suffix(".bin"), options.seq_len, options.rows),
            "TrainLoader": loader.next_step,
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for _ in range(options.rounds):
            for name, step in steps.items():
                found[name].append(timed(step, options.steps))
        loader.close()
    print(f"{options.rows} x {options.seq_len} tokens a step, {options.tokens:,} tokens, workers {options.workers}")
    base = [statistics.median(values) for values in zip(*found["plain loop"], strict=True)]
    for name, values in found.items():
        wall, cpu = (statistics.median(column) for column in zip(*values, strict=True))
        ratios = f"{wall / base[0]:.2f} x wall, {cpu / base[1]:.2f} x CPU"
        print(f"{name:12} {1e3 * wall:7.3f} ms wall {1e3 * cpu:7.3f} ms CPU a step   ({ratios})")


if __name__ == "__main__":
    main()
