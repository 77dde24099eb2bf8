"""What length costs: `configs/hybrid.toml` beside the same size with softmax attention in all layers, in turns.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive python tests/benchmarks/hybrid_length.py

First table: CPU time of a generated token after so many positions, as `forge-run generate` computes it, and the memory
of the cache. Second: CPU time of a training step per token, optimizer included, with equal tokens a step throughout.
Weights are untrained, which changes no time. Medians of rounds, in which both models follow each other.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch

from forge_core import load_job
from forge_core.data.loader import TrainLoader
from forge_core.engine.build import build_context, build_run
from forge_core.engine.step import Stepper
from forge_testing.catalogs import installed

CONFIG = Path(__file__).parents[2] / "configs/hybrid.toml"
PLAIN = ("model.attention={heads = 2, qk_norm = true}", "model.ffn.hidden=416")
"""As in the first lines of the file: equal to 0.5 % in parameters."""
SIDES = {"hybrid": (), "plain": PLAIN}
PIECE = 512
"""Positions that are read at a time to fill a cache."""


def built(name, folder, seq_len, tokens):
    """Build one side's run with so many tokens a step."""
    sizes = [f"train.seq_len={seq_len}", f"train.global_batch_size={tokens // seq_len}", "train.micro_batch_size=1"]
    overrides = [f"--{item}" for item in (*SIDES[name], *sizes, f"job.output={folder}")]
    job = load_job(CONFIG, overrides=overrides, catalog=installed(), world_size=1)
    return build_run(job, build_context(job, installed(), None))


def cpu(function):
    """Returns the seconds of CPU time of a call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def show(length, values):
    """Print a row: both sides, and the ratio of plain to hybrid."""
    row = "".join(f"{values[name]:>10.3f}" for name in SIDES)
    print(f"{length:>8}{row}{values['plain'] / values['hybrid']:>8.2f}", end="", flush=True)


def generation(models, options):
    """Print the cost of a token after several lengths."""
    print(f"generated token, ms of CPU time\n{'after':>8}{'hybrid':>10}{'plain':>10}{'ratio':>8}   MB of cache")
    for length in options.positions:
        caches = {name: model.new_cache(1, length + options.tokens + 1) for name, model in models.items()}
        times = {name: [] for name in SIDES}
        for name, model in models.items():
            for start in range(0, length, PIECE):
                positions = torch.arange(start, min(start + PIECE, length))[None]
                with torch.no_grad():
                    model.decode({"input_ids": positions % 4096, "positions": positions}, caches[name])
        for place in range(length, length + options.tokens + 1):
            for name, model in models.items():
                batch = {"input_ids": torch.tensor([[place % 4096]]), "positions": torch.tensor([[place]])}
                with torch.inference_mode():
                    times[name].append(cpu(lambda: model.decode(batch, caches[name])))  # noqa: B023
        show(length, {name: 1e3 * median(seconds[1:]) for name, seconds in times.items()})  # the first warms up
        sizes = [sum(part.nbytes for part in cache.values()) / 1e6 for cache in caches.values()]
        print("".join(f"{size:>8.2f}" for size in sizes))


def training(options, folder):
    """Print the cost of a token of a training step at several lengths."""
    print(f"training step, µs of CPU time a token\n{'seq_len':>8}{'hybrid':>10}{'plain':>10}{'ratio':>8}")
    for length in options.lengths:
        runs = {name: built(name, folder, length, options.step_tokens) for name in SIDES}
        steppers = {name: Stepper(run) for name, run in runs.items()}
        loaders = {name: TrainLoader(run.job, run.datasets, run.context) for name, run in runs.items()}
        times = {name: [] for name in SIDES}

        def step(name, number):
            _, sums = steppers[name].gradients(loaders[name].next_step(), number)  # noqa: B023
            decided = SimpleNamespace(grad_norm=steppers[name].norm(), requests=SimpleNamespace(skip=""))  # noqa: B023
            steppers[name].update(decided, sums["loss_sum"])  # noqa: B023

        for number in range(options.rounds + 1):
            for name in SIDES:
                times[name].append(cpu(lambda: step(name, number)))  # noqa: B023
        for loader in loaders.values():
            loader.close()
        show(length, {name: 1e6 * median(seconds[1:]) / options.step_tokens for name, seconds in times.items()})
        print()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, nargs="*", default=[512, 2048, 8192, 16384])
    parser.add_argument("--tokens", type=int, default=40, help="generated tokens of each length")
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 1024, 2048, 4096])
    parser.add_argument("--step-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7, help="training steps of each length")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = {name: built(name, folder, 512, 512).model.eval() for name in SIDES}
        sizes = ", ".join(f"{name} {sum(p.numel() for p in model.parameters()):,}" for name, model in models.items())
        print(f"parameters: {sizes}; torch {torch.__version__}, {torch.get_num_threads()} threads")
        generation(models, options)
        training(options, folder)


if __name__ == "__main__":
    main()
