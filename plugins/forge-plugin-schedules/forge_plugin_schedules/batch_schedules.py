"""The components `piecewise` and `ramp` of kind `batch_schedule`: sizes of the global batch over a run.

Their keys count tokens, as users do; a schedule itself goes by the number of the sample, which no layout and no resume
changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import deep_iterable, gt, min_len

from forge_core.contracts.components import BatchScheduleComponent
from forge_core.contracts.errors import Problem

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job, TrainSection


@frozen(kw_only=True)
class TokenBatchSchedule(BatchScheduleComponent):
    """A schedule whose sizes begin after a number of tokens."""

    def starts(self, train: TrainSection) -> Iterable[tuple[int, int]]:
        """Yields tokens fed and the sequences per step from there on, ascending, the first after no token."""
        raise NotImplementedError

    def sizes(self, train: TrainSection) -> Mapping[int, int]:
        """The sizes by sample: one begins with the first step that starts at or after its tokens."""
        # Rounded up, as tokens may end within a sequence.
        return {-(-tokens // train.seq_len): size for tokens, size in self.starts(train)}

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that the largest size is `train.global_batch_size`, for which memory and layout are planned."""
        largest, stated = max(size for _, size in self.starts(job.train)), job.train.global_batch_size
        if largest != stated:
            yield Problem("", f"its largest batch is {largest} sequences; set train.global_batch_size = {largest}")

    def choices(self, context: BuildContext) -> Sequence[tuple[str, str, str]]:
        """The steps from which each size holds, for the summary of the run."""
        train = context.job.train
        # Several sizes may begin within one step, which has the last of them.
        by_step = {train.steps_until(sample): size for sample, size in self.sizes(train).items()}
        parts = [f"{size:,} from step {step + 1:,}" for step, size in by_step.items() if step < train.steps]
        shown = parts if len(parts) <= 4 else [*parts[:2], "…", parts[-1]]
        return [("batch sizes", ", ".join(shown), "train.batch_schedule")]


@frozen(kw_only=True)
class Piecewise(TokenBatchSchedule):
    """Sizes that are named one by one, as for a batch that is doubled where the critical batch size has grown.

    Merrill et al. 2025 (arXiv 2505.23971) measure where that is, and raise the rate by the square root of the factor:
    `[[data.phases]]` with `start_tokens` and `lr_factor`.
    """

    batch_sizes: tuple[int, ...] = field(validator=[min_len(1), deep_iterable(gt(0))])
    """Sequences per step, one after the other; the largest is `train.global_batch_size`."""
    start_tokens: tuple[int, ...] = field(validator=deep_iterable(gt(0)))
    """Tokens fed after which each size but the first begins, ascending."""

    def starts(self, train: TrainSection) -> Iterable[tuple[int, int]]:
        return zip((0, *self.start_tokens), self.batch_sizes, strict=False)

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that every size but the first has a start, in ascending order, and the largest size."""
        if len(self.start_tokens) + 1 != len(self.batch_sizes):
            message = f"has {len(self.start_tokens)} entries, and there are {len(self.batch_sizes)} sizes"
            yield Problem("start_tokens", f"{message}; every size but the first begins after one")
            return
        for before, after in pairwise(self.start_tokens):
            if after <= before:
                yield Problem("start_tokens", f"{after:,} comes after {before:,}; they must ascend")
        yield from super().problems(job, layout)


@frozen(kw_only=True)
class Ramp(TokenBatchSchedule):
    """Equal increments over equal spans, as Megatron-LM's `--rampup-batch-size`."""

    start: int = field(validator=gt(0))
    """Sequences per step at first."""
    increment: int = field(validator=gt(0))
    """Sequences per step that are added at once; they divide the difference between `start` and the global batch."""
    ramp_tokens: int = field(validator=gt(0))
    """Tokens fed after which the batch has `train.global_batch_size` sequences."""

    def starts(self, train: TrainSection) -> Iterable[tuple[int, int]]:
        """Increment k of n begins after k / n of `ramp_tokens`."""
        count = max(0, train.global_batch_size - self.start) // self.increment
        for number in range(count + 1):
            yield -(-number * self.ramp_tokens // max(count, 1)), self.start + number * self.increment

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that increments lead from `start` to the global batch."""
        full = job.train.global_batch_size
        if self.start > full:
            yield Problem("start", f"{self.start} is more than train.global_batch_size = {full}")
        elif rest := (full - self.start) % self.increment:
            message = f"from {self.start} in steps of {self.increment} no batch has train.global_batch_size = {full}"
            yield Problem("increment", f"{message} sequences, as {rest} are left over")
