"""Cost of checks of silent data corruption: a checked step beside one that is not, digests, copies that are compared.

OMP_NUM_THREADS=1 python tests/benchmarks/checked_steps.py --dim 256 --layers 4 --rounds 12

Steps of one run take turns, checked and not, so that other work of the machine meets both; figures are of CPU time of
this process, and ratios of medians.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from statistics import median

from attrs import define

from forge_core import Catalog, Trainer, TrainingHook
from forge_plugin_adamw import AdamW
from forge_plugin_resilience.sdc import SDC
from forge_plugin_resilience.sdc.digests import bit_sums
from forge_plugin_resilience.sdc.replicas import _tensors
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, tiny_job


@define(kw_only=True, slots=False)
class Times(TrainingHook):
    """CPU time of each step, and of the digests of gradients, and of weights and optimizer state."""

    resumes_as = "safe"

    def on_train_begin(self, context):
        self.steps, self.gradients, self.copies = {True: [], False: []}, [], []

    def on_step_begin(self, context):
        self.began = time.process_time()

    def on_gradients(self, context):
        self.passes = time.process_time() - self.began
        self.gradients.append(timed(lambda: bit_sums({n: p.grad for n, p in context.model.named_parameters()})))
        self.began = time.process_time()

    def on_step_end(self, context):
        if context.step > 2:  # the first allocate
            self.steps[context.step % 2 == 0].append(self.passes + time.process_time() - self.began)
        self.copies.append(timed(lambda: bit_sums(_tensors(context))))
        self.parameters = sum(parameter.numel() for parameter in context.model.parameters())


def timed(work):
    """CPU seconds that `work` takes."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    times = Times()
    with tempfile.TemporaryDirectory() as folder:
        attention = GroupedQueryAttention(heads=options.dim // 64)
        model = Transformer(vocab_size=4096, dim=options.dim, layers=options.layers, attention=attention)
        job = tiny_job(
            folder,
            Catalog.installed(),
            model=model,
            optimizer=AdamW(lr=1e-3),
            data={"sources": (Numbers(sequences=256),)},
            plugins={"sdc": SDC(every=2)},
            steps=2 + 2 * options.rounds,
            global_batch_size=8,
            micro_batch_size=4,
            seq_len=options.seq_len,
        )
        Trainer(job, hooks=[times], echo=lambda text: None).run()
    plain, checked = median(times.steps[False]), median(times.steps[True])
    gradients, copies = median(times.gradients), median(times.copies)
    print(f"{times.parameters / 1e6:.1f} million parameters, {8 * options.seq_len} tokens a step")
    print(f"a step                     {1e3 * plain:8.1f} ms")
    print(f"a checked step             {1e3 * checked:8.1f} ms, {checked / plain:.2f} of a step")
    print(f"digest of gradients        {1e3 * gradients:8.1f} ms, {gradients / plain:.4f} of a step")
    print(f"digest of weights, AdamW   {1e3 * copies:8.1f} ms, {copies / plain:.4f} of a step")
    print(f"every = 100 costs          {(checked - plain) / plain:.2f} % of the time of a run")


if __name__ == "__main__":
    main()
