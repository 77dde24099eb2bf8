"""Cost of a sampled step of `training_stats`: CPU time within the hook, beside the CPU time of a step without it.

OMP_NUM_THREADS=1 python tests/benchmarks/training_stats_cost.py

Both are medians over the same run, of which every second step is sampled, in float32 on one thread. On a GPU the hook
queues its kernels and does not wait, so that this time of the host is hidden unless the job is launch-bound.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from attrs import define

from forge_core.contracts.components import TrainingHook
from forge_core.engine.trainer import Trainer
from forge_core.plugins.catalog import Catalog
from forge_plugin_taps.stats import TrainingStats
from forge_plugin_taps.stats.step_probe import StepProbe
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, tiny_job

SEQUENCES, SEQ_LEN, LAYERS, VOCABULARY = 8, 256, 6, 4096


@define(kw_only=True, slots=False)
class Timed(TrainingStats):
    """Measures the CPU seconds of its own events, by step."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.seconds: dict[int, float] = {}

    def _measure(self, function: Callable[..., None], *args: Any) -> None:
        began = time.process_time()
        function(*args)
        self.seconds[self._step] = self.seconds.get(self._step, 0.0) + time.process_time() - began

    def measures_logits(self) -> Any:
        """A context in which the logits that the hook computes within the loss are measured, too."""
        compute = StepProbe._measure
        return mock.patch.object(StepProbe, "_measure", lambda *args: self._measure(compute, *args))

    def on_step_begin(self, context: Any) -> None:
        self._step = context.step
        self._measure(super().on_step_begin, context)

    def on_gradients(self, context: Any) -> None:
        self._measure(super().on_gradients, context)

    def on_step_end(self, context: Any) -> None:
        self._measure(super().on_step_end, context)


@define(kw_only=True, slots=False)
class Clock(TrainingHook):
    """CPU seconds from one end of a step to the next."""

    def on_train_begin(self, context: Any) -> None:
        self.seconds: dict[int, float] = {}
        self._last = time.process_time()

    def on_step_end(self, context: Any) -> None:
        now = time.process_time()
        self.seconds[context.step], self._last = now - self._last, now


def measure(dim: int, steps: int, **settings: Any) -> None:
    """Print the median cost of a sampled step of a model of this width."""
    attention = GroupedQueryAttention(heads=4, kv_heads=2)
    hook, clock = Timed(interval=2, **settings), Clock()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        stack.enter_context(hook.measures_logits())
        job = tiny_job(
            folder,
            Catalog.installed(),
            model=Transformer(vocab_size=VOCABULARY, dim=dim, layers=LAYERS, attention=attention),
            data={"sources": (Numbers(held_out=5),)},
            hooks={"training_stats": hook},
            steps=steps,
            global_batch_size=SEQUENCES,
            seq_len=SEQ_LEN,
            checkpoint={"interval": 0},
        )
        Trainer(job, hooks=[clock], echo=lambda text: None).run()
    sampled = statistics.median(value for step, value in hook.seconds.items() if step > 2 and step % 2 == 0)
    plain = statistics.median(value for step, value in clock.seconds.items() if step > 2 and step % 2)
    print(
        f"{dim:4} wide, {settings or 'default'}: a step {1e3 * plain:.0f} ms, in the hook {1e3 * sampled:.1f} ms: "
        f"{100 * sampled / plain:.1f} % of a sampled step, {sampled / plain:.3f} % of steps at an interval of 100",
        flush=True,
    )


def main() -> None:
    """Measure, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{LAYERS} layers, {SEQUENCES} x {SEQ_LEN} tokens, {VOCABULARY} words, one thread, CPU time")
    for dim in (128, 256):
        for settings in ({}, {"logits": False}, {"logits": False, "updates": False}):
            measure(dim, options.steps, **settings)


if __name__ == "__main__":
    main()
