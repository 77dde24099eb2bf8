"""Batches without content, for what needs their shapes only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.job import Job


def zero_batch(job: Job, rows: int, device: torch.device | None = None) -> Batch:
    """Returns a batch of `rows` whole sequences, all zeros: tokens, labels, and what the model asks for besides.

    A fake one within a `FakeTensorMode`.
    """
    shape, fields = (rows, job.train.seq_len), job.model.batch_fields(job)
    batch = {name: torch.zeros(shape, dtype=torch.int64, device=device) for name in ("input_ids", "labels")}
    for name, entry in fields.items():
        batch[name] = torch.zeros((rows, *entry.shape), dtype=getattr(torch, entry.dtype), device=device)
    return batch
