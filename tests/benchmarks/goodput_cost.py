"""Cost of the hooks `goodput`, `interval` and `disk` a step: time inside their calls, in a run of a trivial model.

OMP_NUM_THREADS=1 python tests/benchmarks/goodput_cost.py
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict

os.environ.setdefault("OMP_NUM_THREADS", "1")
STEPS, WARM = 3000, 200
EVENTS = ("on_step_begin", "on_step_end")


def main() -> None:
    from forge_core.engine.trainer import Trainer
    from forge_plugin_resilience.goodput import Disk, Goodput, Interval
    from forge_testing import tiny_job

    spent: dict[str, list[float]] = defaultdict(list)

    def timed(base: type) -> type:
        """The hook, whose calls in a step are timed; those of a step are added up."""

        def method(event: str):
            inner = getattr(base, event)

            def call(self, context) -> None:
                began = time.perf_counter()
                inner(self, context)
                taken = time.perf_counter() - began
                if event == "on_step_begin":
                    spent[base.__name__].append(taken)
                else:
                    spent[base.__name__][-1] += taken

            return call

        return type(f"Timed{base.__name__}", (base,), {event: method(event) for event in EVENTS})

    with tempfile.TemporaryDirectory() as folder:
        job = tiny_job(folder, steps=STEPS, checkpoint={"interval": 0, "interval_minutes": 0})
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        python = [timed(Goodput)(every_s=1.0), timed(Interval)(), Disk()]
        began = time.perf_counter()
        Trainer(job, hooks=python, echo=lambda text: None).run()
        sys.stdout = sys.__stdout__
    print(f"{1e3 * (time.perf_counter() - began) / STEPS:.2f} ms a step in all; disk does nothing in a step")
    for name, taken in spent.items():
        steps = sorted(1e6 * seconds for seconds in taken[WARM:])
        high = steps[-len(steps) // 100]
        print(f"{name}: median {statistics.median(steps):.1f} us, mean {statistics.mean(steps):.1f}, 99 % {high:.0f}")


if __name__ == "__main__":
    main()
