"""What an evaluation is given when it runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen

from forge_core.data.held_out import evaluation_batches
from forge_core.launch.phases import Phases
from forge_core.parallel.mesh import all_reduce_tokens

if TYPE_CHECKING:
    from forge_core.config.job import Job
    from forge_core.context import BuildContext
    from forge_core.protocols import Batch, Dataset, Executor, Model


@frozen(kw_only=True)
class EvaluationContext:
    """What an evaluation may use. The model is in evaluation mode, gradients are off."""

    job: Job
    build: BuildContext
    step: int
    model: Model
    """What this rank has of it, as stages left it. `executor` runs it, and knows what they have put around it and which
    ranks have what; called by itself, it may compute something else, or keep weights that change later."""
    executor: Executor
    """`executor.evaluate([batch])` gives the job's loss, and `executor.evaluate([batch], measure)` whatever `measure`
    makes of head, hidden states and batch, under every layout."""
    held_out: Dataset | None
    """Held-out sequences of all sources together, in a fixed order."""
    phases: Phases = field(factory=Phases)
    """Where this rank is, for the watch over the ranks: every batch counts as progress."""

    def batches(self, dataset: Dataset, count: int) -> Iterable[Batch]:
        """This rank's share of the first `count` sequences, in batches of the job's micro-batch size, on the device.

        Every rank gets equally many batches of equal shape; where the sequences do not suffice, the remaining rows
        have only ignored labels.
        """
        for number, batch in enumerate(evaluation_batches(dataset, count, self.job, self.build), 1):
            self.phases.enter(f"evaluation, batch {number}")
            yield batch

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the token dimensions, in place."""
        return all_reduce_tokens(tensor, self.build.mesh)
