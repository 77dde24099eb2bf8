"""Training hooks: one that keeps what a run was fed, one whose state shapes the training."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import define, field

from forge_core.contracts.components import TrainingHook

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from forge_core.contracts.contexts import StepContext, TrainContext
    from forge_core.contracts.data import Batch

SEEN = "seen.jsonl"
"""In the run folder: what each process began with, was fed at every step, and ended with. No line is ever removed."""


@define(kw_only=True, slots=False)
class Seen(TrainingHook):
    """Writes down the samples of every step, under the number of the process."""

    def on_train_begin(self, context: TrainContext) -> None:
        self._write(context, begin=context.step)

    def on_step_begin(self, context: StepContext) -> None:
        self._write(context, step=context.step, samples=[name for batch in context.batches for name in names(batch)])

    def on_train_end(self, context: TrainContext) -> None:
        self._write(context, end=context.step)

    def _write(self, context: TrainContext, **record: Any) -> None:
        assert context.folder is not None
        append(context.folder / SEEN, json.dumps({"process": os.getpid(), **record}) + "\n")


def append(path: Path, line: str) -> None:
    """Append in one call to the kernel: a kill leaves the whole line or none of it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def names(batch: Batch) -> list[str]:
    """A name for each sequence of a micro-batch, made of everything the batch has of it."""
    columns = [batch[key] for key in sorted(batch)]
    return [_digest([column[row] for column in columns]) for row in range(len(columns[0]))]


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


@define(kw_only=True, slots=False)
class Remembering(TrainingHook):
    """Scales gradients by what it remembers of earlier steps: state that is lost or doubled shows in the weights.

    Also asks for a checkpoint now and then, at steps that depend on its state.
    """

    steps: int = field(init=False, default=0)
    norms: list[float] = field(init=False, factory=list)
    """Of the last three steps."""
    notes: dict[str, Any] = field(init=False, factory=lambda: {"evaluations": 0, "best": None})
    average: Any = field(init=False, default=None)
    """() float64: running mean of the gradient norm."""
    histogram: Any = field(init=False, default=None)
    """(4,) int64: how often the norm fell into each bin."""

    def on_train_begin(self, context: TrainContext) -> None:
        import torch

        if self.average is None:
            self.average, self.histogram = torch.zeros((), dtype=torch.float64), torch.zeros(4, dtype=torch.int64)

    def on_gradients(self, context: StepContext) -> None:
        assert context.grad_norm is not None
        norm = float(context.grad_norm)
        self.norms = [*self.norms[-2:], norm]
        self.average = 0.9 * self.average + 0.1 * norm
        self.histogram[min(3, int(norm))] += 1
        self._scale(context)

    def _scale(self, context: StepContext) -> None:
        factor = 1 / (1 + 0.1 * (sum(self.norms) + float(self.average) + self.notes["evaluations"]))
        for parameter in context.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(factor)

    def on_step_end(self, context: StepContext) -> None:
        self.steps += 1
        context.log("remembered", float(self.average))
        if (self.steps + int(self.histogram[1])) % 5 == 0:
            context.request_checkpoint()

    def on_eval_end(self, context: StepContext, metrics: Mapping[str, float]) -> None:
        loss = metrics["eval/loss"]
        best = loss if self.notes["best"] is None else min(loss, self.notes["best"])
        self.notes = {"evaluations": self.notes["evaluations"] + 1, "best": best}


@define(kw_only=True, slots=False)
class Forgetful(Remembering):
    """Keeps its state to itself: what the harness must notice."""

    def state_dict(self) -> dict[str, Any]:
        return {}
