"""Jobs of the GPU benchmarks, and steps of them."""

from __future__ import annotations

import contextlib
import io
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tomli_w
import torch
from torch import Tensor

from forge_core import Catalog, Job, Trainer, TrainingHook, load_job
from forge_core.data.loader import TrainLoader
from forge_core.engine.build import Run, build_context, build_run
from forge_core.engine.step import Stepper
from forge_core.engine.trainer import Summary
from forge_core.metrics.flops import peak_flops
from forge_core.parallel.mesh import local_part
from gpu.bench import Bench

REPOSITORY = Path(__file__).resolve().parents[2]
RANDOM_TOKENS = f"{REPOSITORY}/tests/benchmarks/random_tokens.py:RandomTokens"

Sections = Mapping[str, Any]
"""Tables of a job file."""


def decoder(bench: Bench, **changes: Any) -> dict[str, Any]:
    """A job of a dense decoder: 0.4 billion parameters at sequence 2048, or a few thousand at 64."""
    vocabulary = bench.size(32_000, 256)
    sections: dict[str, Any] = {
        "job": {"name": "gpu", "output": str(bench.folder)},
        "train": {
            "steps": 1000,
            "global_batch_size": bench.size(8, 4),
            "micro_batch_size": bench.size(4, 2),
            "seq_len": bench.size(2048, 64),
            "precision": "bf16",
            "grad_clip_norm": 1.0,
            "device": bench.device.type,
            "dry_run": "never",
        },
        "model": {
            "type": "transformer",
            "dim": bench.size(1024, 64),
            "layers": bench.size(24, 2),
            "vocab_size": vocabulary,
            "attention": {"heads": bench.size(16, 4), "kv_heads": bench.size(8, 2), "qk_norm": True},
            "ffn": {"hidden": bench.size(2816, 128)},
        },
        "data": {"sources": [{"type": RANDOM_TOKENS, "vocab_size": vocabulary, "sequences": 64}]},
        "loss": {"type": "chunked_cross_entropy"},
        "optimizer": {"type": "adamw", "lr": 1e-3},
    }
    return merged(sections, changes)


def experts(number: int, chosen: int, hidden: int) -> dict[str, Any]:
    """The table `[model.ffn]` of experts in place of a dense part."""
    return {"type": "moe", "experts": number, "hidden": hidden, "router": {"type": "softmax_topk", "top_k": chosen}}


def merged(sections: Sections, changes: Sections) -> dict[str, Any]:
    """Tables laid over tables; one that names another `type` takes the place of the one below."""
    result = dict(sections)
    for name, value in changes.items():
        below = result.get(name)
        together = isinstance(value, Mapping) and isinstance(below, Mapping)
        if together and value.get("type", below.get("type")) == below.get("type"):
            result[name] = merged(below, value)
        else:
            result[name] = value
    return result


def load(bench: Bench, sections: Sections, files: Sequence[Path] = ()) -> Job:
    """The job of files and tables, the tables uppermost."""
    bench.folder.mkdir(parents=True, exist_ok=True)
    path = bench.folder / "job.toml"
    path.write_text(tomli_w.dumps(sections))
    return load_job(*files, path, with_data=False)


class Steps:
    """A job that is built and advanced step by step, without loggers and checkpoints."""

    def __init__(self, job: Job) -> None:
        catalog = Catalog.installed()
        self.job = job
        self.run: Run = build_run(job, build_context(job, catalog, None))
        self.stepper = Stepper(self.run)
        self.loader = TrainLoader(job, self.run.datasets, self.run.context)
        self._number = 0

    def __call__(self) -> tuple[Tensor, Tensor]:
        """One step; returns its loss and gradient norm, on the device."""
        batches = self.loader.next_step()
        train = self.job.train
        self.run.rates.apply(self._number, self._number * train.global_batch_size * train.seq_len)
        _, sums = self.stepper.gradients(batches, self._number)
        decided: Any = SimpleNamespace(grad_norm=self.stepper.norm(), requests=SimpleNamespace(skip=""))
        self.stepper.update(decided, sums["loss_sum"])
        self._number += 1
        return sums["loss_sum"] / sums["count"], decided.grad_norm

    def speed(self, bench: Bench, steps: int, warm: int) -> dict[str, float]:
        """Tokens a second of the median step, its milliseconds, and the seconds of the first."""
        durations = []
        for _ in range(warm + steps):
            bench.synchronize()
            start = time.perf_counter()
            self()
            bench.synchronize()
            durations.append(time.perf_counter() - start)
        median = statistics.median(durations[warm:])
        tokens = self.job.train.global_batch_size * self.job.train.seq_len
        return {"tokens_per_s": tokens / median, "step_ms": median * 1e3, "first_step_s": durations[0]}

    def utilisation(self, tokens_per_s: float) -> dict[str, float | None]:
        """Model FLOPs over the peak in bf16: with the causal half of attention, as Forge counts it, and with all pairs
        of positions, as PaLM's appendix B does. What attention computes is proportional to the length, so that of a
        sequence twice as long stands for all pairs."""
        peak, model, length = peak_flops(self.job, self.run.context.device), self.run.model, self.job.train.seq_len
        if peak is None:
            return {"mfu": None, "mfu_palm": None}
        whole: Any = model
        return {
            "mfu": whole.flops(length) * tokens_per_s / peak,
            "mfu_palm": whole.flops(2 * length) * tokens_per_s / peak,
        }

    def close(self) -> None:
        """Stop loading."""
        self.loader.close()


@contextmanager
def steps_of(job: Job) -> Iterator[Steps]:
    """A job within whose context steps are made."""
    steps = Steps(job)
    try:
        yield steps
    finally:
        steps.close()


def copy_weights(source: Run, target: Run) -> None:
    """Give a run of one rank the parameters of another, which may be on another device and in another dtype."""
    weights = {item.name: local_part(item.parameter) for item in source.parameters}
    with torch.no_grad():
        for item in target.parameters:
            local_part(item.parameter).copy_(weights[item.name])


def train(job: Job, *hooks: TrainingHook) -> Summary:
    """Train a job to its end, silently."""
    with contextlib.redirect_stdout(io.StringIO()):
        return Trainer(job, hooks=hooks, echo=lambda text: None).run()
