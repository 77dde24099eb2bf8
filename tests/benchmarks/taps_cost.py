"""Cost of a sampled step: CPU time spent in taps and their sinks, and CPU time of steps with and without them.

OMP_NUM_THREADS=1 python tests/benchmarks/taps_cost.py

The first figure is the sum of the calls of taps' own functions in a sampled step, and of what sinks do in the next. The
second is the difference between steps of the same run, of which one in three is sampled: on a busy machine, noise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import ExitStack, redirect_stdout
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from attrs import define, frozen

from forge_core.contracts.components import TrainingHook
from forge_core.engine.trainer import Trainer
from forge_core.plugins.catalog import Catalog
from forge_plugin_taps import Sink, SinkComponent, Store, Taps
from forge_plugin_taps.hook import TapsHook
from forge_plugin_taps.recorder import Recorder
from forge_plugin_taps.site import Current, Site
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, tiny_job

SEQUENCES, SEQ_LEN, DIM, LAYERS = 8, 256, 256, 6
POINTS = ("layers.*.resid_pre", "layers.*.resid_mid", "layers.*.resid_post")
TIMED = ((Site, "take"), (Current, "enter"), (Recorder, "mark"), (TapsHook, "on_step_begin"), (TapsHook, "on_step_end"))
PERIOD, WARM = 3, 1
"""One step of three is sampled, in the next one sinks settle, and the third is as without taps."""


@frozen(kw_only=True)
class Nothing(SinkComponent):
    """A sink that uses nothing."""

    def build(self, context: Any, taps: Any) -> Sink:
        return Ignoring()


class Ignoring(Sink):
    def consume(self, sample: Any) -> None:
        pass


@define(kw_only=True, slots=False)
class Clock(TrainingHook):
    """CPU seconds of each step, all hooks included, from one end of a step to the next; and those within taps."""

    def __attrs_post_init__(self) -> None:
        self.seconds: list[float] = []
        self.within: list[float] = []
        self.spent = self._last = 0.0

    def timed(self, function: Any) -> Any:
        def call(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args)
            finally:
                self.spent += time.thread_time() - began

        return call

    def on_train_begin(self, context: Any) -> None:
        self._last = time.process_time()

    def on_step_end(self, context: Any) -> None:
        now = time.process_time()
        self.seconds.append(now - self._last)
        self.within.append(self.spent)
        self._last, self.spent = now, 0.0


def measure(positions: int, stored: bool, periods: int) -> tuple[float, float, float]:
    """Returns CPU seconds of a step without taps, those within taps, and the difference between steps."""
    attention = GroupedQueryAttention(heads=4, kv_heads=2)
    model = Transformer(vocab_size=512, dim=DIM, layers=LAYERS, attention=attention)
    taps = Taps(interval=PERIOD, positions=positions, points=POINTS, sinks={"sink": Store() if stored else Nothing()})
    clock = Clock()
    with ExitStack() as stack:
        for cls, name in TIMED:
            stack.enter_context(mock.patch.object(cls, name, _method(clock, getattr(cls, name))))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        job = tiny_job(
            folder,
            Catalog.installed(),
            model=model,
            data={"sources": (Numbers(held_out=5),)},
            parallel={"taps": taps},
            steps=PERIOD * (periods + WARM),
            global_batch_size=SEQUENCES,
            seq_len=SEQ_LEN,
            checkpoint={"interval": 0},
        )
        Trainer(job, hooks=[clock], echo=lambda text: None).run()
    begin = PERIOD * WARM - 1  # step 3 k is sampled: begin with one
    sampled, settling, plain = (clock.seconds[begin + kind : -1 : PERIOD] for kind in range(PERIOD))
    within = [clock.within[begin + kind : -1 : PERIOD] for kind in range(2)]
    difference = statistics.median(sampled) + statistics.median(settling) - 2 * statistics.median(plain)
    return statistics.median(plain), sum(map(statistics.median, within)), difference


def _method(clock: Clock, function: Any) -> Any:
    timed = clock.timed(function)
    return lambda self, *args: timed(self, *args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--periods", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{DIM} wide, {LAYERS} layers, {SEQUENCES} x {SEQ_LEN} tokens, {3 * LAYERS} points, one thread, CPU time")
    for positions, stored in ((8, False), (8, True), (64, False), (64, True)):
        plain, within, difference = measure(positions, stored, options.periods)
        print(
            f"{positions * SEQUENCES:4} positions, {'with a store' if stored else 'without a sink':14}  a step "
            f"{1e3 * plain:.0f} ms, in taps {1e3 * within:.1f} ms: {100 * within / plain:.2f} %; difference between "
            f"steps {100 * difference / plain:+.2f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
