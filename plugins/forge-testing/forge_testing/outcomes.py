"""Interruptions of runs, and what a run leaves behind that must not depend on them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from itertools import zip_longest
from typing import Any, Literal

import torch
from attrs import define
from torch import Tensor

from forge_core.checkpoint.run_folder import storage_of
from forge_core.checkpoint.storage import read_manifest
from forge_core.contracts.components import TrainingHook
from forge_core.contracts.contexts import CheckpointContext, StepContext, TrainContext
from forge_core.engine.trainer import Summary
from forge_kit.tools.checkpoints import stored_tensors
from forge_kit.tools.run_owner import metrics_file
from forge_kit.tools.whole_tensors import read_whole

TIMES = {"time", "tokens_per_second", "step_seconds", "mfu", "data_wait", "peak_memory_gb"}
"""Keys of a metrics line that no two runs share; so are all that start with `seconds/`."""


class PowerCut(Exception):
    """Raised by `Die`."""


@define(kw_only=True, slots=False)
class Stop(TrainingHook):
    """Requests a stop after a step, as a signal does: the run saves a checkpoint and ends."""

    step: int

    def on_step_end(self, context: StepContext) -> None:
        if context.step == self.step:
            context.request_stop("a test of continuing")

    def __str__(self) -> str:
        return f"stop {self.step}"


@define(kw_only=True, slots=False)
class Die(TrainingHook):
    """Ends the run by an exception at an event of a step, with what was saved until then."""

    step: int
    event: Literal["begin", "end", "save", "rollback"] = "end"

    def on_step_begin(self, context: StepContext) -> None:
        self._die("begin", context.step)

    def on_step_end(self, context: StepContext) -> None:
        self._die("end", context.step)

    def on_checkpoint_save(self, context: CheckpointContext) -> None:
        self._die("save", context.step)

    def on_rollback(self, context: TrainContext, step: int, reason: str) -> None:
        self._die("rollback", context.step)

    def _die(self, event: str, step: int) -> None:
        if (event, step) == (self.event, self.step):
            raise PowerCut

    def __str__(self) -> str:
        return f"die {self.step} {self.event}"


def metrics_of(summary: Summary) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl` of a run, without times."""
    records = map(json.loads, metrics_file(summary.folder).read_text().splitlines())
    return [{key: value for key, value in record.items() if not is_time(key)} for record in records]


def is_time(key: str) -> bool:
    """Return whether a key of a metrics line has a value that no two runs share."""
    return key in TIMES or key.startswith("seconds/")


def losses_of(summary: Summary) -> list[float]:
    """Return the training losses of a finished run."""
    return [record["loss"] for record in metrics_of(summary) if "loss" in record]


def metrics_differences(actual: Summary, expected: Summary, ignored: Collection[str] = ()) -> list[str]:
    """Return, for each metrics line that differs, its number and keys, without times and ignored keys."""
    nothing: dict[str, Any] = {}
    pairs = zip_longest(metrics_of(actual), metrics_of(expected), fillvalue=nothing)
    differ = []
    for number, (one, other) in enumerate(pairs, 1):
        # NaN, which is not equal to itself, is written as text.
        differ_in = [key for key in {**other, **one} if (key in one, one.get(key)) != (key in other, other.get(key))]
        if keys := [key for key in differ_in if key not in ignored]:
            differ.append(f"line {number} of the metrics ({', '.join(keys)})")
    return differ


def saved_state(summary: Summary) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """Return tensors and plain values of a run's last checkpoint, without those that describe the run."""
    folder = storage_of(summary.folder).path(summary.step)
    stored = stored_tensors(folder)
    values = read_manifest(folder)
    return read_whole(folder, stored, stored), {key: values[key] for key in ("progress", "optimizer", "extras")}


def state_differences(actual: Summary, expected: Summary) -> list[str]:
    """Return the names that differ, by any bit, in the last checkpoints of two runs."""
    (tensors, values), (expected_tensors, expected_values) = saved_state(actual), saved_state(expected)
    names = [*expected_tensors, *(name for name in tensors if name not in expected_tensors)]
    differ = [name for name in names if not _same(tensors.get(name), expected_tensors.get(name))]
    return differ + [key for key in values if values[key] != expected_values[key]]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def some(names: list[str]) -> str:
    """Return some of the names as text for a message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
