"""Shapes of batches: batches without content, and lengths that a layout can divide."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


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
