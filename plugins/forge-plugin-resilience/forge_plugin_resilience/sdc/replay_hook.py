"""The hook of a replay: loss and norm of each step, and the sequences of the last one."""

from __future__ import annotations

import json
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from attrs import define

from forge_core import TrainingHook
from forge_core.config.mixture import source_names
from forge_core.contracts.components import WhenResumed
from forge_core.files import write_atomically
from forge_core.parallel.layout import plan_layout
from forge_core.parallel.mesh import gather_objects, global_rank
from forge_plugin_resilience.sdc.sdc import SDC

if TYPE_CHECKING:
    from forge_core.contracts.contexts import StepContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job

SHOWN = 400
"""Characters of a sequence that are shown."""


@define(kw_only=True, slots=False)
class Replayed(TrainingHook):
    """Notes loss and gradient norm of each step up to `at`, writes them into `file`, and ends the process there."""

    resumes_as: ClassVar[WhenResumed | None] = "safe"

    at: int
    worst: int = 10
    file: str

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Step, loss and gradient norm of the steps so far."""
        return []

    def on_step_begin(self, context: StepContext) -> None:
        """Let the plugin `sdc`, if the job has it, check the step `at`."""
        if context.step == self.at:
            for plugin in _checks(context.job):
                plugin.checked.due = True  # after the plugin's own hook, which comes before all `[hooks]`

    def on_gradients(self, context: StepContext) -> None:
        """Note the step; at the step `at`, write the result and end the process before the update. Collective."""
        assert context.output is not None
        assert context.grad_norm is not None
        sums, counts = context.output.per_sequence
        own = sums.double().cpu().numpy(), counts.double().cpu().numpy()
        loss = float(context.output.loss_sum.double()), float(context.output.count.double())
        every = gather_objects((*own, *loss))
        ranks = by_samples(_layout(context.job, len(every)))
        loss_sum = sum(every[rank][2] for rank in ranks.flat)
        count = sum(every[rank][3] for rank in ranks.flat)
        norm = float(context.grad_norm)
        self.rows.append({"step": context.step, "loss": loss_sum / max(count, 1.0), "grad_norm": norm})
        if context.step == self.at:
            # Ranks along the second axis have parts of the same sequences.
            totals = [[np.sum([every[rank][part] for rank in row], axis=0) for part in (0, 1)] for row in ranks]
            self._finish(context, [(row[0], *total) for row, total in zip(ranks.tolist(), totals, strict=True)])

    def _finish(self, context: StepContext, losses: list[Any]) -> None:
        means = [
            (float(total / count), rank, number)
            for rank, sums, counts in losses
            for number, (total, count) in enumerate(zip(sums, counts, strict=True))
            if count
        ]
        worst = sorted(means, reverse=True)[: self.worst]
        own = {number: self._sequence(context, number) for _, rank, number in worst if rank == global_rank()}
        texts = gather_objects(own)
        digests = next((plugin.checked.digests for plugin in _checks(context.job)), [])
        if global_rank() == 0:
            sequences = [{"loss": loss, **texts[rank][number]} for loss, rank, number in worst]
            result = {"rows": self.rows, "gradients": digests, "losses": [mean for mean, _, _ in means]}
            text = json.dumps({**result, "worst": sequences})
            write_atomically(Path(self.file), text)
        gather_objects(None)  # rank 0 has written
        # Here and not by the end of the run: it would save a checkpoint, and tell hooks of the job that it has ended.
        os._exit(0)

    def _sequence(self, context: StepContext, number: int) -> dict[str, str]:
        ids = torch.cat([batch["input_ids"] for batch in context.batches])[number].tolist()
        names, sources = source_names(context.job), "0"
        if "sources" in context.batches[0]:
            sources = str(int(torch.cat([batch["sources"] for batch in context.batches])[number]))
        text = context.tokenizer.decode(ids) if context.tokenizer is not None else " ".join(map(str, ids))
        return {"source": names[int(sources)], "text": text[:SHOWN]}


def by_samples(layout: Layout) -> np.ndarray:
    """Ranks with different tokens: (ranks with different sequences, ranks with parts of the same ones)."""
    ranks = np.arange(layout.world_size).reshape([size for _, size in layout.sizes])
    # One of the ranks that have the same tokens is enough.
    taken = ranks[tuple(slice(None) if dimension.divides_tokens else 0 for dimension, _ in layout.sizes)]
    kept = [dimension for dimension, _ in layout.sizes if dimension.divides_tokens]
    order = sorted(range(len(kept)), key=lambda axis: not kept[axis].samples)  # stable: those with samples first
    return np.asarray(taken).transpose(order).reshape(layout.data_parallel, -1)


def _layout(job: Job, ranks: int) -> Layout:
    return job.layout_for(ranks) or plan_layout(job, ranks)[0]


def _checks(job: Job) -> list[SDC]:
    return [plugin for plugin in job.plugins.values() if isinstance(plugin, SDC)]
