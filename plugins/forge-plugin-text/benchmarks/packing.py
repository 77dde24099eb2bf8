"""Training steps on packed documents, side by side: concatenated, isolated and best-fit, with a mask and without.

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive python packing.py --seq-len 1024

A model of 4.2 million parameters on random documents whose lengths are log-normal. A step is forward, backward and
update of one micro-batch; sides take turns, and figures are medians. The one to trust is processor time over all
threads.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from attrs import frozen

from forge_core.contracts.components import DatasetComponent
from forge_core.data.packing import Concatenate
from forge_core.data.reading import collate
from forge_core.engine.build import Run, build_context, build_run
from forge_core.plugins.catalog import Catalog
from forge_plugin_adamw import AdamW
from forge_plugin_losses import ChunkedCrossEntropy
from forge_plugin_text.packing import BestFit, Isolate
from forge_plugin_transformer import GroupedQueryAttention, SwiGLU, Transformer
from forge_testing import tiny_job
from forge_testing.documents import ListedDocuments

VOCABULARY = 4096
SIDES = {
    "concatenate": (Concatenate(), "auto"),
    "isolate, mask": (Isolate(), "mask"),
    "isolate, segments": (Isolate(), "segments"),
    "best_fit, mask": (BestFit(), "mask"),
    "best_fit, segments": (BestFit(), "segments"),
}


@frozen(kw_only=True)
class LogNormalDocuments(DatasetComponent):
    """Documents of random ids."""

    median: float
    tokens: int

    def build(self, context: Any) -> ListedDocuments:
        generator = np.random.default_rng(0)
        lengths = generator.lognormal(np.log(self.median), 1.0, 2 * int(self.tokens / self.median)).astype(int) + 1
        lengths = lengths[np.cumsum(lengths) < self.tokens]
        return ListedDocuments([generator.integers(0, VOCABULARY - 1, n) for n in lengths], VOCABULARY - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--median", type=float, default=250, help="length of a document")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: build(*side, options, folder) for name, side in SIDES.items()}
        report(measure({name: stepper(run) for name, run in runs.items()}, options.steps), options.batch_tokens)


def build(packing: Any, documents: str, options: argparse.Namespace, folder: str) -> Run:
    attention = GroupedQueryAttention(heads=8, kv_heads=4, qk_norm=True, documents=documents)
    model = Transformer(
        dim=256, layers=4, vocab_size=VOCABULARY, tie_embeddings=True, attention=attention, ffn=SwiGLU(hidden=768)
    )
    source = LogNormalDocuments(median=options.median, tokens=20 * options.batch_tokens)
    job = tiny_job(
        folder,
        model=model,
        loss=ChunkedCrossEntropy(),
        optimizer=AdamW(),
        data={"sources": (source,), "packing": packing},
        seq_len=options.seq_len,
        global_batch_size=options.batch_tokens // options.seq_len,
        precision=options.precision,
    )
    return build_run(job, build_context(job, Catalog.installed(), None))


def batches(run: Run) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches without end."""
    (dataset,), size = run.datasets, run.job.train.global_batch_size
    while True:
        for start in range(0, len(dataset) - size + 1, size):
            yield collate([dataset[index] for index in range(start, start + size)])


def stepper(run: Run) -> Callable[[], int]:
    """Returns a function that makes a step and returns the number of its labels."""
    micro_batches = batches(run)

    def step() -> int:
        batch = next(micro_batches)
        labels = (batch["labels"] >= 0).sum()
        run.executor.train_step([batch], labels)
        run.optimizer.step()
        run.optimizer.zero_grad()
        return int(labels)

    return step


def measure(steps: dict[str, Callable[[], int]], count: int) -> dict[str, list[tuple[float, float, int]]]:
    """Processor and wall seconds and labels of each step, the first of each side left out."""
    figures: dict[str, list[tuple[float, float, int]]] = {name: [] for name in steps}
    for _ in range(count + 1):
        for name, step in steps.items():
            cpu, wall = time.process_time(), time.perf_counter()
            labels = step()
            figures[name].append((time.process_time() - cpu, time.perf_counter() - wall, labels))
    return {name: values[1:] for name, values in figures.items()}


def report(figures: dict[str, list[tuple[float, float, int]]], tokens: int) -> None:
    base = statistics.median(cpu for cpu, _, _ in figures["concatenate"])
    print("| | CPU ms a step | wall ms a step | positions/s | labels a position |")
    print("|---|---|---|---|---|")
    for name, values in figures.items():
        cpu, wall = (statistics.median(value[place] for value in values) for place in range(2))
        filled = statistics.mean(value[2] for value in values) / tokens
        print(
            f"| {name} | {cpu * 1e3:.0f} ({cpu / base:.2f}) | {wall * 1e3:.0f} | {tokens / wall:,.0f} | {filled:.3f} |"
        )


if __name__ == "__main__":
    main()
