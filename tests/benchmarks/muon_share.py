"""What Muon takes of a training step, and how ranks divide it.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive python tests/benchmarks/muon_share.py [--rounds 5]

CPU time of a rank, medians over the rounds, the worst rank of each: of the forward and backward passes of its share of
the batch, and of the optimizer's step, collectives included. AdamW beside it. Parameters are sharded (`fsdp`).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from types import SimpleNamespace

from forge_core.contracts.components import OptimizerComponent
from forge_core.data.loader import TrainLoader
from forge_core.engine.step import Stepper
from forge_plugin_adamw import AdamW
from forge_plugin_muon import Muon
from forge_plugin_parallel import FSDP
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing.processes import run_on_ranks
from forge_testing.runs import tiny_run

MODEL = Transformer(dim=512, layers=6, vocab_size=4096, attention=GroupedQueryAttention(heads=8))
SIZES = {"global_batch_size": 8, "micro_batch_size": 2, "seq_len": 512, "precision": "fp32"}


def timed(optimizer: OptimizerComponent, ranks: int, rounds: int) -> tuple[float, float]:
    """CPU seconds of passes and of the optimizer's step, of this rank."""
    with tempfile.TemporaryDirectory() as folder:
        stages = {"fsdp": FSDP()} if ranks > 1 else {}
        run = tiny_run(folder, model=MODEL, optimizer=optimizer, parallel=stages, **SIZES)
        stepper, loader = Stepper(run), TrainLoader(run.job, run.datasets, run.context)
        passes, steps = [], []
        for step in range(rounds + 1):
            batches = loader.next_step()
            started = time.process_time()
            _, sums = stepper.gradients(batches, step)
            decided = SimpleNamespace(grad_norm=stepper.norm(), requests=SimpleNamespace(skip=""))
            between = time.process_time()
            stepper.update(decided, sums["loss_sum"])
            passes.append(between - started)
            steps.append(time.process_time() - between)
        loader.close()
    return statistics.median(passes[1:]), statistics.median(steps[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print("| optimizer | ranks | passes, CPU ms | update, CPU ms | update's share |\n|---|---|---|---|---|")
    for name, optimizer in {"adamw": AdamW(), "muon": Muon(), "muon, fp32": Muon(ns_dtype="fp32")}.items():
        for ranks in (1, 4):
            found = run_on_ranks(ranks, lambda rank: timed(optimizer, ranks, rounds), timeout=600)  # noqa: B023
            passes, update = (max(numbers) for numbers in zip(*found, strict=True))
            share = update / (passes + update)
            print(f"| {name} | {ranks} | {passes * 1e3:.0f} | {update * 1e3:.0f} | {share:.1%} |", flush=True)


if __name__ == "__main__":
    main()
