"""Where the host waits for the device in a step: the table `tests/gpu/waits.toml`, against what a device counts."""

from __future__ import annotations

import re
import tomllib
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
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
JOBS: dict[str, dict[str, Any]] = {
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
    **{name: merged(IGNORING, {"optimizer": {"type": name}}) for name in PLAIN},
    "parameters in bf16": merged(IGNORING, {"optimizer": {"type": "adamw_8bit", "parameter_dtype": "bf16"}}),
    "schedule-free": merged(IGNORING, {"optimizer": {"type": "schedule_free_adamw"}}),
    "lion, skipping": {"optimizer": {"type": "lion"}},
    "muon, skipping": {"optimizer": {"type": "muon"}},
    "experts with capacity": {"model": {"ffn": {**experts(8, 2, 64), "capacity_factor": 1.0}}},
    "experts in fp32": {"train": {"precision": "fp32"}, "model": {"ffn": experts(8, 2, 64)}},
    "soap": merged(IGNORING, {"optimizer": {"type": "soap", "precondition_frequency": 1}}),
}
"""Jobs by the names of the table."""
TABLE = Path(__file__).parents[1] / "waits.toml"


def table() -> Mapping[str, Mapping[str, int]]:
    """For each job, how often the host waits in a step, by file; empty: never."""
    jobs: Mapping[str, Mapping[str, int]] = tomllib.loads(TABLE.read_text())["jobs"]
    return jobs


@piece("waits", "steps and their metrics with no wait that is not declared (set_sync_debug_mode)")
def waits(bench: Bench) -> None:
    if not bench.on_gpu:
        bench.notes.append("Steps on the pretended device, which counts waits, in the place of CUDA's debug mode.")
    expected, tried = table(), {}
    bench.check(expected.keys() == JOBS.keys(), f"waits.toml has {sorted(expected.keys() ^ JOBS.keys())} or lacks them")
    for name, changes in JOBS.items():
        if missing(["torchao"]) and ("float8" in str(changes) or "8bit" in str(changes)):
            bench.row("not tried", job=name, why="torchao is not installed")
        else:
            tried[name] = changes
    counted = {} if bench.on_gpu else on_device(_count_all, bench, tried)
    for name, changes in tried.items():
        with bench.case(name):
            places = _on_gpu(bench, name, changes) if bench.on_gpu else counted[name]
            _compare(bench, name, places, expected[name])


def _compare(bench: Bench, name: str, places: list[str], expected: Mapping[str, int]) -> None:
    counted = Counter(place.partition(":")[0] for place in places)
    bench.row("waits", job=name, expected=_text(expected), counted=_text(counted), lines=", ".join(sorted(set(places))))
    # CUDA's debug mode warns of several steps, and of one wait perhaps in several lines: files are compared there
    same = counted.keys() == expected.keys() if bench.on_gpu else counted == Counter(expected)
    bench.check(same, f"{name}: the host waits at {', '.join(places) or 'no line'}; waits.toml has {_text(expected)}")


def _text(waits: Mapping[str, int]) -> str:
    return ", ".join(f"{file} {count}" for file, count in sorted(waits.items())) or "none"


def _job(bench: Bench, name: str, changes: dict[str, Any]) -> Any:
    small = {"dim": 64, "layers": 2, "attention": {"heads": 4, "kv_heads": 2}, "ffn": {"hidden": 128}}
    sections = merged(decoder(bench, model=small, train={"steps": 8, "seq_len": 64}), changes)
    sections["checkpoint"] = {"interval": 0}
    sections["job"]["name"] = re.sub(r"\W+", "-", name)  # each job its own run: it would continue another one's
    if sections["optimizer"]["type"].startswith("schedule_free"):
        sections["optimizer"].pop("lr", None)
    return load(bench, sections)


def _count_all(bench: Bench, jobs: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Where the host waits in the third step of each job, on the pretended device: caches are warm then."""
    # What is compiled as a whole is called as it is: the device has no compiler
    with patch.object(torch, "compile", lambda function=None, **options: function or (lambda inner: inner)):
        return {name: _count(bench, name, changes) for name, changes in jobs.items()}


def _count(bench: Bench, name: str, changes: dict[str, Any]) -> list[str]:
    watch = PretendedWatch()
    train(
        _job(
            bench, name, merged(changes, {"train": {"device": NAME, "global_batch_size": 2, "steps": 4, "seq_len": 32}})
        ),
        watch,
    )
    return watch.places


@define(kw_only=True, slots=False)
class PretendedWatch(TrainingHook):
    """As `Watch`, on the pretended device."""

    def __attrs_post_init__(self) -> None:
        self.places: list[str] = []

    def on_step_begin(self, context: Any) -> None:
        if context.step == 3:
            reset_waits()
        elif context.step == 4:
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
