"""Batches: without content, of lengths that a layout can divide, and with other rows than those that were drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from forge_core.contracts.errors import ForgeError

if TYPE_CHECKING:
    from forge_core.contracts.contexts import StepContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job

ROW = ("input_ids", "labels")
"""Entries that every batch has."""
ORIGIN = ("sources", "numbers", "slots")
"""Entries that name the rows which were drawn."""
PLACES = "places"
"""Batch entry (B, s), int64, where ranks share sequences: the place of each position in its sequence, from 0. Not
`positions`, which may count each document by itself."""


def zero_batch(job: Job, rows: int, device: torch.device | None = None) -> Batch:
    """Returns a batch of `rows` whole sequences, all zeros: tokens, labels, and the other entries that the model needs.

    Within a `FakeTensorMode`, its tensors are fake.
    """
    # From the job and not from a model, so that a plan can use it before one is built
    shape, fields = (rows, job.train.seq_len), job.model.batch_fields(job)
    batch = {name: torch.zeros(shape, dtype=torch.int64, device=device) for name in ("input_ids", "labels")}
    for name, entry in fields.items():
        batch[name] = torch.zeros((rows, *entry.shape), dtype=getattr(torch, entry.dtype), device=device)
    return batch


def length_multiple(layout: Layout) -> int:
    """Returns a number by which a layout divides sequences; 1: it does not.

    Ranks that share sequences or matrices take equal pieces of a sequence, and context parallel two each.
    """
    sharing = math.prod(size for dimension, size in layout.sizes if not dimension.samples and not dimension.layers)
    return 2 * sharing if sharing > 1 else 1


def replace_rows(context: StepContext, batches: Sequence[Batch]) -> None:
    """Train a step on other rows, such as completions of the prompts that were drawn; only in `on_step_begin`.

    The position in the data stays. As many micro-batches as were drawn, of the same rows and length; ranks with the
    same samples give the same ones. Other entries may differ from those that were drawn: all counts of the step are
    taken of the new rows. Collective: every rank calls it.

    Args:
        context: of the step; its `batches` are replaced.
        batches: this rank's micro-batches.

    Raises:
        ForgeError: on all ranks, if rows do not fit.
    """
    # Late: it imports the store of a run's ranks, which a plan needs not
    from forge_core.parallel.mesh import gather_objects, sample_rank

    assert context.build is not None, "the run loop calls hooks with it"
    shapes, others = ([tuple(batch[name].shape) for batch in of for name in ROW] for of in (context.batches, batches))
    fault = "" if shapes == others else f"rows of the shapes {others} in place of {shapes}"
    # Sums in place of the rows, which would have to be sent to all ranks
    content = [batch[name].double().sum().item() for batch in batches for name in ROW]
    own = sample_rank(context.build.mesh, context.build.layout), content, fault
    contents: dict[int, list[float]] = {}
    for rank, (samples, theirs, wrong) in enumerate(gather_objects(own)):
        if wrong or contents.setdefault(samples, theirs) != theirs:
            raise ForgeError(f"replace_rows: rank {rank} gives {wrong or 'other rows than one that shares them'}")
    context.batches = [
        {**{name: entry for name, entry in before.items() if name in ORIGIN}, **after}
        for before, after in zip(context.batches, batches, strict=True)
    ]
