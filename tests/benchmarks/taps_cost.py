"""Cost of a sampled step: CPU time of this process, in steps with taps at all residual points and in steps without.

OMP_NUM_THREADS=1 python tests/benchmarks/taps_cost.py              # 64 positions in all, no sink and a store
OMP_NUM_THREADS=1 python tests/benchmarks/taps_cost.py --compiled
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import redirect_stdout
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from attrs import define

from forge_core.contracts.components import TrainingHook
from forge_core.engine.trainer import Trainer
from forge_core.plugins.catalog import Catalog
from forge_plugin_compile import Compile
from forge_plugin_taps import Store, Taps
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, tiny_job

SEQUENCES, SEQ_LEN, DIM, LAYERS = 8, 256, 256, 6
POINTS = ("layers.*.resid_pre", "layers.*.resid_mid", "layers.*.resid_post")
PERIOD, WARM = 3, 2
"""One step of three is sampled, in the next one sinks settle, and the third is as without taps."""


@define(kw_only=True, slots=False)
class Clock(TrainingHook):
    """CPU seconds of each step, all hooks included, from one end of a step to the next."""

    def __attrs_post_init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_begin(self, context: Any) -> None:
        self._last = time.process_time()

    def on_step_end(self, context: Any) -> None:
        now = time.process_time()
        self.seconds.append(now - self._last)
        self._last = now


def measure(positions: int, stored: bool, compiled: bool, periods: int) -> tuple[float, float, float]:
    """Returns CPU seconds of a sampled step with what its sinks do later, of one without, and the ratio of the rest."""
    attention = GroupedQueryAttention(heads=4, kv_heads=2)
    model = Transformer(vocab_size=512, dim=DIM, layers=LAYERS, attention=attention)
    taps = Taps(interval=PERIOD, positions=positions, points=POINTS, sinks={"store": Store()} if stored else {})
    stages: dict[str, Any] = {"taps": taps, **({"compile": Compile()} if compiled else {})}
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        job = tiny_job(
            folder,
            Catalog.installed(),
            model=model,
            data={"sources": (Numbers(held_out=5),)},
            parallel=stages,
            steps=PERIOD * (periods + WARM),
            global_batch_size=SEQUENCES,
            seq_len=SEQ_LEN,
            checkpoint={"interval": 0},
        )
        Trainer(job, hooks=[clock], echo=lambda text: None).run()
    steps = clock.seconds[PERIOD * WARM - 1 : -1]  # step 3 k is sampled: begin with one
    of = [statistics.median(steps[kind::PERIOD]) for kind in range(PERIOD)]
    extra = statistics.median(
        a + b - 2 * c for a, b, c in zip(*(steps[kind::PERIOD] for kind in range(3)), strict=False)
    )
    return of[0] + of[1] - of[2], of[2], extra / of[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--periods", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{DIM} wide, {LAYERS} layers, {SEQUENCES} x {SEQ_LEN} tokens, {3 * LAYERS} points, one thread, CPU time")
    for positions, stored in ((8, False), (8, True), (64, False), (64, True)):
        sampled, plain, ratio = measure(positions, stored, options.compiled, options.periods)
        sink = "with a store" if stored else "without a sink"
        print(
            f"{positions * SEQUENCES:4} positions, {sink:14}  {1e3 * plain:.0f} ms without, {1e3 * sampled:.0f} ms sampled:"
            f" {100 * ratio:+.2f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
