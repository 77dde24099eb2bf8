"""The hook `length_schedule`: shorter sequences in a part of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import attrs
from attrs import define, field
from attrs.validators import deep_iterable, gt, min_len

from forge_core.contracts.components import TrainingHook, WhenResumed
from forge_core.contracts.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.contexts import StepContext, TrainContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job, TrainSection


@define(kw_only=True, slots=False)
class LengthSchedule(TrainingHook):
    """Shorter sequences in a part of the run, as sequence length warm-up (Li et al. 2022, arXiv 2108.06084).

    Each sequence of `train.seq_len` positions is cut into pieces, which become separate sequences: attention is within
    a piece only. A step has as many tokens as before, in the same order, so the data, its phases and the tokens of a
    step are the same as without the schedule.
    """

    resumes_as: ClassVar[WhenResumed | None] = "flag"

    lengths: tuple[int, ...] = field(validator=[min_len(1), deep_iterable(gt(0))])
    """Positions of a piece, one after the other; each divides `train.seq_len`."""
    start_tokens: tuple[int, ...] = field(validator=deep_iterable(gt(0)))
    """Tokens fed after which each length but the first begins, ascending."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks lengths and starts, that rows are plain tokens, and every stage for each length."""
        train = job.train
        if len(self.start_tokens) + 1 != len(self.lengths):
            message = f"has {len(self.start_tokens)} entries, and there are {len(self.lengths)} lengths"
            yield Problem("start_tokens", f"{message}; every length but the first begins after one")
        for before, after in pairwise(self.start_tokens):
            if after <= before:
                yield Problem("start_tokens", f"{after:,} comes after {before:,}; they must ascend")
        for number, length in enumerate(self.lengths):
            if train.seq_len % length:
                yield Problem(f"lengths.{number}", f"{length} does not divide train.seq_len = {train.seq_len}")
                continue
            shorter = attrs.evolve(job, train=attrs.evolve(train, seq_len=length))
            for name, stage in job.parallel.items():
                for problem in stage.problems(shorter, layout):
                    yield Problem(f"lengths.{number}", f"with sequences of {length}, parallel.{name}: {problem}")
        if fields := job.model.batch_fields(job):
            yield Problem("", f"cuts rows of tokens, and the model takes {', '.join(fields)} of a whole row, too")
        if not job.loss.predicts_next_token:
            yield Problem("", "cuts rows into pieces, and the loss is one of whole rows")

    def on_train_begin(self, context: TrainContext) -> None:
        """Computes the FLOPs per token at each length, from the whole model: a pipeline's rank has only a part."""
        self._flops: Mapping[int, float | None] = {}
        if context.build is not None:
            import torch

            with torch.device("meta"):
                model = context.build.build(context.job.model)
            self._flops = {length: model.flops(length) for length in self.lengths}

    def on_step_begin(self, context: StepContext) -> None:
        """Replaces the step's rows by their pieces."""
        length = self.length(context.job.train, context.step)
        if flops := self._flops.get(length):
            context.log("flops_per_token", flops)
        if pieces := context.job.train.seq_len // length - 1:
            context.batches = [_cut(batch, pieces + 1, length) for batch in context.batches]

    def length(self, train: TrainSection, step: int) -> int:
        """The positions of a piece in a step, from 1: by its first sample, so a run that resumes has the same."""
        fed = train.sample_after(step - 1) * train.seq_len
        return self.lengths[sum(start <= fed for start in self.start_tokens)]


def _cut(batch: Batch, pieces: int, length: int) -> Batch:
    """Rows (B, S, …) as (B pieces, length, …), what belongs to a row (B, …) with each of its pieces."""
    rows, positions = batch["labels"].shape

    def cut(name: str, value: Tensor) -> Tensor:
        if value.ndim > 1 and value.shape[1] == positions:
            return value.reshape(rows * pieces, length, *value.shape[2:])
        value = value.repeat_interleave(pieces, 0)
        if name == "examples":  # a count, which is the row's and not each piece's
            value[[number for number in range(rows * pieces) if number % pieces]] = 0
        return value

    return {name: cut(name, value) for name, value in batch.items()}
