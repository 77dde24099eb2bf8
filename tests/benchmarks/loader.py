"""What loading costs: `TrainLoader` against a plain loop over the same memory map, in alternating rounds.

python tests/benchmarks/loader.py [--tokens 100000000] [--seq-len 1024] [--rows 64]
python tests/benchmarks/loader.py --sums [--tokens 50000000]

The plain loop draws random windows from the map as nanoGPT does: two slices a sequence, widened to int64 and stacked.

With `--sums`: the CPU time of whole passes over files whose blocks are checked by their CRC-32 when they are first
read, of the pass that checks them and of a later one, against the same loader without any check, in alternating rounds.
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
from forge_kit.data.block_sums import write_sums
from forge_kit.data.token_file import HEADER, TokenFile, TokenFileWriter
from forge_testing import tiny_job


@frozen(kw_only=True)
class Tokens(DatasetComponent):
    stem: str

    def build(self, context):
        return TokenFile(Path(self.stem))


class Unchecked(TokenFile):
    """What `TokenFile.tokens` would be without checks."""

    def tokens(self, start: int, stop: int) -> np.ndarray:
        return self._ids[start:stop].astype(np.int64)


@frozen(kw_only=True)
class UncheckedTokens(Tokens):
    def build(self, context):
        return Unchecked(Path(self.stem))


def compare_sums(options: argparse.Namespace, folder: str) -> None:
    """Print what the check sums of blocks cost in a pass over a file that a process has not read before."""
    stem = Path(folder) / "corpus"
    write_tokens(stem, options.tokens)
    for path in sorted(Path(folder).iterdir()):
        write_sums(path)
    catalog, steps = Catalog.installed(), options.tokens // (options.rows * options.seq_len)
    sizes = {"global_batch_size": options.rows, "seq_len": options.seq_len}
    times: dict[str, list[float]] = {}
    for number in range(options.rounds + 1):
        for source in (UncheckedTokens, Tokens)[:: 1 if number % 2 else -1]:
            job = tiny_job(folder, catalog, **sizes, data={"sources": (source(stem=str(stem)),)})
            context = build_context(job, catalog, None)
            loader = TrainLoader(job, build_datasets(job, context), context)
            for name in ("first", "later"):
                times.setdefault(f"{source.__name__} {name}", []).append(timed(loader.next_step, steps)[1])
            loader.close()
    for name in ("first", "later"):
        bare, checked = (times[f"{source} {name}"][1:] for source in ("UncheckedTokens", "Tokens"))  # without warm-up
        ratio = statistics.median(one / other for one, other in zip(checked, bare, strict=True))
        both = ", ".join(f"{1e3 * statistics.median(values):.3f}" for values in (bare, checked))
        least = min(checked) / min(bare)
        print(f"{name} pass: {both} ms CPU a step without and with sums; ratio {ratio:.3f}, of the least {least:.3f}")


def write_tokens(stem: Path, tokens: int) -> None:
    with TokenFileWriter(stem, 50_000, 0) as writer:
        writer.add("random", np.random.default_rng(0).integers(1, 50_000, tokens))


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
    parser.add_argument("--sums", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.sums:
            compare_sums(options, folder)
            return
        stem = Path(folder) / "corpus"
        write_tokens(stem, options.tokens)
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
