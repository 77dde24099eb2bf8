"""How far a training step is from the sum of its matrix products, each measured alone on the same processor.

    python tests/benchmarks/product_limit.py --dtype fp32 --layers 12 --dim 320 --hidden 960 --vocab 10007 --seq 768

Takes the sizes of `step_time.py`. One step of Forge's job records every product and every attention that runs: sizes,
strides and dtype. Each of them is then computed alone, on other numbers, in the same process and with the job's own
plugins. Figures are CPU time over all threads, medians; `share` is that of the step.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import step_time
import torch
from attrs import define
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from forge_core import TrainingHook, load_job
from forge_core.engine.trainer import Trainer

REPEATS = 5
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_"}


class Record(TorchDispatchMode):
    """Counts the calls of products and attention by their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._opname in PRODUCTS or "attention" in function._opname:
            self.calls[function, tree_map(describe, tuple(args)), tuple((kwargs or {}).items())] += 1
        return function(*args, **(kwargs or {}))


@define(frozen=True)
class Form:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> torch.Tensor:
        size = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return torch.randn(size).to(self.dtype).as_strided(self.shape, self.stride)


def describe(value):
    return Form(tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


def alone(function, args, kwargs) -> float:
    """Median CPU milliseconds of one call."""
    given = [each.make() if isinstance(each, Form) else each for each in args]
    function(*given, **dict(kwargs))
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        function(*given, **dict(kwargs))
        times.append((time.process_time() - started) * 1e3)
    return statistics.median(times)


@define(kw_only=True, slots=False)
class Limit(TrainingHook):
    steps: int

    def on_train_begin(self, context) -> None:
        self.times, self.record = [], Record()

    def on_step_begin(self, context) -> None:
        self.started = time.process_time()
        if context.step == self.steps - 1:
            self.record.__enter__()

    def on_step_end(self, context) -> None:
        self.times.append((time.process_time() - self.started) * 1e3)
        if context.step == self.steps - 1:
            self.record.__exit__(None, None, None)
            self.report(statistics.median(self.times[1:-1]))

    def report(self, step: float) -> None:
        rows = [(count * alone(*call), count, call) for call, count in self.record.calls.items()]
        print(f"{'ms':>9} {'share':>6} {'calls':>5}  kernel and sizes")
        for cost, count, (function, args, _) in sorted(rows, key=lambda row: -row[0]):
            sizes = " x ".join(str(list(each.shape)) for each in args if isinstance(each, Form))
            dtype = next(each.dtype for each in args if isinstance(each, Form))
            print(f"{cost:9.1f} {cost / step:6.1%} {count:5}  {function._opname} {sizes} {dtype}")
        total = math.fsum(row[0] for row in rows)
        print(f"products and attention alone {total:.0f} ms of a step of {step:.0f} ms: {total / step:.2f}")


def main() -> None:
    options = step_time.arguments()
    options.engine, options.steps = "forge", 6
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    torch.set_num_threads(options.threads)
    sys.path.insert(0, str(step_time.HERE))
    with tempfile.TemporaryDirectory() as folder:
        job_file = Path(folder) / "job.toml"
        job_file.write_text(step_time.job_text(options, folder))
        overrides = [f"--{key}" for key in options.set]
        Trainer(load_job(job_file, overrides=overrides), hooks=[Limit(steps=options.steps)], echo=lambda _: None).run()


if __name__ == "__main__":
    main()
