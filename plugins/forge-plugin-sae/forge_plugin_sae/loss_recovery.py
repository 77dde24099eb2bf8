"""Losses with reconstructions in place of activations, under the layout of the run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch

from forge_core.contracts.errors import ForgeError
from forge_core.parallel.layout import micro_batches
from forge_core.parallel.mesh import world_size
from forge_plugin_sae.reconstruction import Reconstruct, Remember, Zero
from forge_plugin_sae.sink import SAESink
from forge_plugin_taps import Recorder, recorder_of

if TYPE_CHECKING:
    from forge_core.contracts.contexts import EvaluationContext
    from forge_plugin_sae.evaluation import LossRecovered
    from forge_plugin_sae.model import SparseCoder


def recovered(settings: LossRecovered, context: EvaluationContext) -> dict[str, float]:
    """The metrics of `LossRecovered`. Collective."""
    recorder = recorder_of(context.model)
    sink = recorder.sinks.get(settings.sink)
    if not isinstance(sink, SAESink):
        raise ForgeError(f"evaluation sae: the run has no sink {settings.sink!r}")
    if sink.divided:
        raise ForgeError(
            f"evaluation sae: tensor parallel divides {sink.divided[0]}; leave it to a point between blocks"
        )
    coders = sink.coders(final=context.step >= context.job.train.steps)
    metrics: dict[str, float] = {}
    # Once for all points, as it depends on none of them
    clean = _loss(recorder, context, settings.sequences, []) if coders else 0.0
    if coders:
        metrics[f"eval/sae/{sink.settings.folder}/clean_loss"] = clean
    for name, coder in coders.items():
        figures = _of_point(recorder, context, settings.sequences, coder, name, sink.targets[name])
        loss, zero = figures.pop("loss"), figures.pop("zero")
        # What the point is worth to the model: nothing if zeros leave the loss as it is
        worth = zero - clean
        figures |= {"loss": loss, "loss_recovered": (zero - loss) / worth if worth else 0.0}
        metrics |= {f"eval/sae/{sink.settings.folder}/{name}/{key}": value for key, value in figures.items()}
    return metrics


def _of_point(
    recorder: Recorder, context: EvaluationContext, sequences: int, coder: SparseCoder, name: str, target: str
) -> dict[str, float]:
    source = Remember() if coder.transcodes else None
    # Three edits are put at once, and switched on by name: none at first, then two, then the third.
    edit = Reconstruct(coder, source)
    if source is not None:
        recorder.put_edit("sae input", source, name)
    recorder.put_edit("sae", edit, target)
    recorder.put_edit("sae zero", Zero(), target)
    try:
        loss = _loss(recorder, context, sequences, ["sae input", "sae"])
        zero = _loss(recorder, context, sequences, ["sae zero"])
    finally:
        for point in (name, target):
            recorder.take_edits(["sae input", "sae", "sae zero"], point)
    quality = edit.quality
    # Of all ranks: rows that several of them have count several times, which leaves every ratio as it is
    sums = torch.cat([quality.sums, quality.sums.new_tensor([quality.rows])])
    if world_size() > 1:
        torch.distributed.all_reduce(sums)
    quality.sums, quality.rows = sums[:-1], int(sums[-1])
    # Without the loss of a row, which `Reconstruct` does not pass to `quality`
    figures = {key: float(value) for key, value in quality.metrics().items() if key != "loss"}
    return {**figures, "loss": loss, "zero": zero}


def _loss(recorder: Recorder, context: EvaluationContext, sequences: int, edits: Sequence[str]) -> float:
    """Mean held-out loss of a token with some edits on."""
    total = torch.zeros(2, dtype=torch.float64, device=context.build.device)
    assert context.held_out is not None
    batches = iter(context.batches(context.held_out, sequences))
    at_a_time, _ = micro_batches(context.job, context.build.layout)  # as many as a pipeline has in flight
    with recorder.editing(edits):
        while group := list(islice(batches, at_a_time)):
            sums, counts = context.executor.evaluate(group).per_sequence
            total += torch.stack([sums.double().sum(), counts.double().sum()])
    loss_sum, tokens = context.all_reduce(total).tolist()
    return loss_sum / max(tokens, 1)
