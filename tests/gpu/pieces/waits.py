"""Steps in which the host waits for the device, where the plan says that none does."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from attrs import define

from forge_core import TrainingHook
from forge_testing.pretend import NAME, on_device, reset_waits
from forge_testing.pretend import waits as waits_so_far
from gpu.bench import Bench, missing, piece
from gpu.runs import decoder, experts, load, merged, train

IGNORING = {"train": {"non_finite": "ignore"}}
"""For optimizers that cannot leave out an update on the device: the policy alone makes them wait."""

PLAIN = ("lion", "muon", "normuon", "dion", "adamw_8bit")
"""Optimizers that are tried with all else at its defaults."""
SILENT: dict[str, dict[str, Any]] = {
    "dense": {},
    "fp32": {"train": {"precision": "fp32"}},
    "grouped experts": {"model": {"ffn": experts(8, 2, 64)}},
    "balanced experts": {
        "model": {"ffn": {**experts(8, 2, 64), "router": {"type": "sigmoid_topk", "bias_rate": 1e-3}}}
    },
    "smoothing, z-loss": {"loss": {"label_smoothing": 0.1, "z_loss": 1e-4}},
    "multi-token": {"model": {"mtp": {}}},
    "recomputed": {"parallel": {"activation_checkpointing": {}}},
    "offloaded": {"parallel": {"activation_offload": {"min_mb": 0}}},
    "recomputed in part": {"parallel": {"activation_checkpointing": {"mode": "selective"}}},
    "float8": {"parallel": {"float8": {}}},
    "ema": {"plugins": {"ema": {}}},
    **{
        name: merged(IGNORING, {"optimizer": {"type": name}})
        for name in ("lion", "muon", "normuon", "dion", "adamw_8bit")
    },
    "parameters in bf16": merged(IGNORING, {"optimizer": {"type": "adamw_8bit", "parameter_dtype": "bf16"}}),
    "schedule-free": merged(IGNORING, {"optimizer": {"type": "schedule_free_adamw"}}),
}
"""Jobs whose steps must not wait."""

DECLARED: dict[str, dict[str, Any]] = {
    "lion, skipping": {"optimizer": {"type": "lion"}},
    "experts with capacity": {"model": {"ffn": {**experts(8, 2, 64), "capacity_factor": 1.0}}},
    "experts in fp32": {"train": {"precision": "fp32"}, "model": {"ffn": experts(8, 2, 64)}},
    "soap": merged(IGNORING, {"optimizer": {"type": "soap", "precondition_frequency": 1}}),
}
"""Jobs whose steps wait, and say so."""


@piece("waits", "steps and their metrics with no wait that is not declared (set_sync_debug_mode)")
def waits(bench: Bench) -> None:
    if not bench.on_gpu:
        bench.notes.append("Steps on the pretended device, which counts waits, in the place of CUDA's debug mode.")
    jobs = {
        name: (changes, declared)
        for declared, jobs in ((False, SILENT), (True, DECLARED))
        for name, changes in jobs.items()
    }
    tried = {}
    for name, (changes, _) in jobs.items():
        if missing(["torchao"]) and ("float8" in str(changes) or "8bit" in str(changes)):
            bench.row("not tried", job=name, why="torchao is not installed")
        else:
            tried[name] = changes
    counted = {} if bench.on_gpu else on_device(_count_all, bench, tried)
    for name, changes in tried.items():
        with bench.case(name):
            places = _on_gpu(bench, name, changes) if bench.on_gpu else counted[name]
            _compare(bench, name, places, jobs[name][1])


def _compare(bench: Bench, name: str, places: list[str], declared: bool) -> None:
    bench.row("waits", job=name, declared=declared, waits=len(places), first=places[0] if places else "")
    bench.check(bool(places) <= declared, f"{name}: the host waits at {', '.join(sorted(set(places)))}")
    bench.check(bool(places) >= declared, f"{name}: says that it waits, and does not")


def _job(bench: Bench, name: str, changes: dict[str, Any]) -> Any:
    small = {"dim": 64, "layers": 2, "attention": {"heads": 4, "kv_heads": 2}, "ffn": {"hidden": 128}}
    sections = merged(decoder(bench, model=small, train={"steps": 8, "seq_len": 64}), changes)
    sections["checkpoint"] = {"interval": 0}
    sections["job"]["name"] = re.sub(r"\W+", "-", name)  # each job its own run: it would continue another one's
    if sections["optimizer"]["type"].startswith("schedule_free"):
        sections["optimizer"].pop("lr", None)
    return load(bench, sections)


def _count_all(bench: Bench, jobs: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Where the host waits in the fifth step of each job, on the pretended device."""
    # What is compiled as a whole is called as it is: the device has no compiler
    with patch.object(torch, "compile", lambda function=None, **options: function or (lambda inner: inner)):
        return {name: _count(bench, name, changes) for name, changes in jobs.items()}


def _count(bench: Bench, name: str, changes: dict[str, Any]) -> list[str]:
    watch = PretendedWatch()
    train(_job(bench, name, merged(changes, {"train": {"device": NAME, "global_batch_size": 2, "steps": 6}})), watch)
    return watch.places


@define(kw_only=True, slots=False)
class PretendedWatch(TrainingHook):
    """As `Watch`, on the pretended device."""

    def __attrs_post_init__(self) -> None:
        self.places: list[str] = []

    def on_step_begin(self, context: Any) -> None:
        if context.step == 4:
            reset_waits()
        elif context.step == 5:
            self.places = [where.rsplit("/", 1)[-1] for _, where in waits_so_far().elements()]


def _on_gpu(bench: Bench, name: str, changes: dict[str, Any]) -> list[str]:
    watch = Watch()
    job = _job(bench, name, changes)
    with watch.recording():
        train(job, watch)
    return watch.places


@define(kw_only=True, slots=False)
class Watch(TrainingHook):
    """Notes where the host waits, from the fourth step to the last but one: compilers and caches are warm then."""

    def __attrs_post_init__(self) -> None:
        self.places: list[str] = []

    def on_step_begin(self, context: Any) -> None:
        steps = context.job.train.steps
        torch.cuda.set_sync_debug_mode("warn" if 4 <= context.step < steps - 1 else "default")

    def on_train_end(self, context: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within this context, warnings of waits become places."""
        before = warnings.showwarning

        def note(message: Any, *args: Any, **options: Any) -> None:
            if "called a synchronizing" in str(message):  # the mode announces itself by another warning
                self.places.append(_place(traceback.extract_stack()))
            else:
                before(message, *args, **options)

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")


def _place(frames: traceback.StackSummary) -> str:
    """The innermost line of Forge."""
    own = [frame for frame in frames if "/forge_" in frame.filename]
    return f"{own[-1].filename.rsplit('/', 1)[-1]}:{own[-1].lineno}" if own else "outside of Forge"
