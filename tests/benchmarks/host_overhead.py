"""What the engine itself costs a step: CPU time outside forward, backward and optimizer, with a trivial model.

python tests/benchmarks/host_overhead.py
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
STEPS, WARM = 300, 50


def timed(function, spent):
    def call(*args, **kwargs):
        began = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent.append(time.thread_time() - began)

    return call


def main() -> None:
    from attrs import define

    from forge_core import TrainingHook
    from forge_core.engine import loop
    from forge_core.engine.trainer import Trainer
    from forge_testing import tiny_job

    inside: list[float] = []
    totals: list[float] = []

    @define(kw_only=True, slots=False)
    class Watch(TrainingHook):
        def on_train_begin(self, context) -> None:
            context.optimizer.step = timed(context.optimizer.step, inside)

    class Timed(loop.Loop):
        def __init__(self, run, *args) -> None:
            super().__init__(run, *args)
            run.executor.train_step = timed(run.executor.train_step, inside)

        def _step(self) -> None:
            before, began = len(inside), time.thread_time()
            super()._step()
            totals.append(time.thread_time() - began - sum(inside[before:]))

    with tempfile.TemporaryDirectory() as folder:
        import forge_core.engine.trainer as trainer

        trainer.Loop = Timed
        job = tiny_job(folder, steps=STEPS, checkpoint={"interval": 0})
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        Trainer(job, hooks=[Watch()], echo=lambda text: None).run()
        sys.stdout = sys.__stdout__
    overhead = [1e6 * seconds for seconds in totals[WARM:]]
    steps = len(overhead)
    print(f"{statistics.median(overhead):.0f} us a step (median of {steps}; console and jsonl loggers included)")


if __name__ == "__main__":
    main()
