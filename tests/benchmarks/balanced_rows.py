"""Rows that cost unequally, as they were drawn and shared out by cost: the idle time of two ranks.

    OMP_NUM_THREADS=1 python tests/benchmarks/balanced_rows.py

Rows have 1 to 256 patches, whose number is log-normal, and an encoder computes only these. Both orders run in one
process for each rank and in turns, so that a busy machine slows both alike. Idle is the share of a step's computation
for which a rank waits for the slower one, 1 - sum of both / (2 x the larger of both): by the patches of its rows, and
by the CPU time of its forward and backward passes.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from attrs import frozen

from forge_core.contracts.components import DatasetComponent
from forge_core.contracts.data import BatchField
from forge_core.data.loader import TrainLoader
from forge_core.engine.build import build_context, build_run
from forge_core.engine.step import Stepper
from forge_core.plugins.catalog import Catalog
from forge_testing import TinyModel, tiny_job
from forge_testing.processes import run_on_ranks
from forge_testing.tiny import VOCABULARY, NumberSequences
from forge_testing.tiny_model import PatchNetwork

MOST, PATCH = 256, 16


@frozen
class Pictured(NumberSequences):
    """Sequences with patches; those that are not zeros are the row's own."""

    def patches(self, index):
        drawn = np.random.default_rng(index).lognormal(np.log(40), 1.0)
        return int(np.clip(drawn, 1, MOST))

    def __getitem__(self, index):
        patches = np.zeros((MOST, PATCH), np.uint8)
        patches[: self.patches(index)] = 1 + index % 200
        return {**NumberSequences.__getitem__(self, index), "patches": patches}


@frozen
class Costly(Pictured):
    def cost(self, index):
        return float(self.patches(index))


@frozen(kw_only=True)
class Source(DatasetComponent):
    balanced: bool

    def build(self, context):
        return (Costly if self.balanced else Pictured)(4096, context.job.train.seq_len, 1, 0)


class Ragged(PatchNetwork):
    """Encodes the patches that rows have, and none of the zeros after them."""

    def embed(self, batch):
        x = self.embedding(batch["input_ids"])
        rows, places = batch["patches"].any(-1).nonzero(as_tuple=True)
        features = self.patch(batch["patches"][rows, places].to(x.dtype) / 255)
        for block in self.encoder.values():
            features = features + block(features)
        return (x + x.new_zeros(len(x), x.shape[-1]).index_add(0, rows, features)[:, None] / MOST,)


@frozen(kw_only=True)
class RaggedModel(TinyModel):
    def batch_fields(self, job):
        return {"patches": BatchField((MOST, PATCH), "uint8")}

    def build(self, context):
        return Ragged(self.dim, self.layers, VOCABULARY, context.dtype, PATCH, 8)


class Measured:
    """One order of the rows, on this rank."""

    def __init__(self, balanced: bool, micro_batch_size: int) -> None:
        sizes = {"global_batch_size": 16, "micro_batch_size": micro_batch_size, "seq_len": 16}
        job = tiny_job(
            "unused", model=RaggedModel(dim=256, layers=1), data={"sources": (Source(balanced=balanced),)}, **sizes
        )
        self.run = build_run(job, build_context(job, Catalog.installed(), None))
        self.loader, self.stepper = TrainLoader(job, self.run.datasets, self.run.context), Stepper(self.run)
        self.computed, self.walls, self.patches = [], [], []
        self._train_step = self.run.executor.train_step
        self.run.executor.train_step = self._timed  # without the reduction of gradients, which comes after it

    def step(self, number: int) -> None:
        batches = self.loader.next_step()
        self.patches.append(sum(int(batch["patches"].any(-1).sum()) for batch in batches))
        began = time.perf_counter()
        self.stepper.gradients(batches, number)
        self.run.optimizer.zero_grad(set_to_none=True)
        self.walls.append(time.perf_counter() - began)

    def _timed(self, batches, denominator):
        began = time.process_time()
        output = self._train_step(batches, denominator)
        self.computed.append(time.process_time() - began)
        return output


def measure(steps: int, micro_batch_size: int) -> list[list[list[float]]]:
    """Of both orders, for each step: this rank's patches, its CPU seconds, seconds of the whole step."""
    torch.set_num_threads(1)
    orders = [Measured(balanced, micro_batch_size) for balanced in (False, True)]
    for number in range(steps):
        for order in orders:
            order.step(number)
    for order in orders:
        order.loader.close()
    return [[order.patches[5:], order.computed[5:], order.walls[5:]] for order in orders]  # the first ones warm up


def idle(ranks: list[list[float]]) -> float:
    return 1 - sum(map(sum, ranks)) / (2 * sum(map(max, zip(*ranks, strict=True))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    for micro_batch_size in (0, 2):
        ranks = run_on_ranks(2, lambda rank, size=micro_batch_size: measure(steps, size))
        print(f"micro-batches of {micro_batch_size or 8} rows")
        for number, name in enumerate(("as drawn", "by cost")):
            patches, computed = ([rank[number][part] for rank in ranks] for part in (0, 1))
            slower = 1e3 * sum(map(max, zip(*computed, strict=True))) / len(computed[0])
            wall = 1e3 * np.mean(ranks[0][number][2])
            shares = f"idle {idle(patches):5.1%} by patches, {idle(computed):5.1%} by CPU time"
            print(f"  {name:9} {shares}; slower rank {slower:.1f} ms of CPU, step {wall:.1f} ms")


if __name__ == "__main__":
    main()
