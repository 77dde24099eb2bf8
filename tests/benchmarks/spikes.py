"""Cost of the hook `spikes` a step: CPU time of its calls in a run, with a full window.

python tests/benchmarks/spikes.py
"""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
STEPS, WARM = 500, 200


def main() -> None:
    from forge_core.engine.trainer import Trainer
    from forge_plugin_resilience.spikes import Spikes
    from forge_testing import tiny_job

    spent: list[float] = []

    class Timed(Spikes):
        def on_gradients(self, context) -> None:
            began = time.thread_time()
            super().on_gradients(context)
            self.seconds = time.thread_time() - began

        def on_step_end(self, context) -> None:
            began = time.thread_time()
            super().on_step_end(context)
            spent.append(self.seconds + time.thread_time() - began)

    with tempfile.TemporaryDirectory() as folder:
        job = tiny_job(folder, steps=STEPS, checkpoint={"interval": 0})
        hook = Timed(warmup_steps=0, action="warn", threshold=100.0)
        with contextlib.redirect_stdout(io.StringIO()):  # of the console logger
            Trainer(job, hooks=[hook], echo=lambda text: None).run()
    assert len(hook.logarithms["loss"]) == len(hook.logarithms["grad_norm"]) == 128
    micros = [1e6 * seconds for seconds in spent[WARM:]]
    print(f"{statistics.median(micros):.0f} us a step (median of {len(micros)}): both values, a full window of 128")


if __name__ == "__main__":
    main()
