"""Runs a trained model over held-out sequences and stores the tensors at its points, under every layout.

Shapes: B sequences of a micro-batch, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from forge_core.checkpoint.run_folder import JOB
from forge_core.config.load import dump_job
from forge_core.contracts.errors import JobError, Problem
from forge_core.contracts.runtime import LossOutput
from forge_core.data.loader import held_out
from forge_core.data.reading import collate
from forge_core.engine.build import build_datasets
from forge_core.parallel.layout import micro_batches
from forge_core.parallel.mesh import gather_objects, global_rank, sample_rank
from forge_kit.tools.outputs import new_folder
from forge_kit.tools.ranks import executor_of
from forge_plugin_taps.recorder import recorder_of
from forge_plugin_taps.store import Store
from forge_plugin_taps.store_writer import StoreWriter

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch, Dataset
    from forge_kit.tools.trained_model import TrainedModel


def extract(trained: TrainedModel, out: Path, *, sequences: int, group: int, edits: Sequence[str] = ()) -> int:
    """Write a store of held-out sequences. Collective.

    Args:
        trained: of `forge_core.load_model`, with the stage `taps`, whose points and positions are taken.
        out: folder of the store, new or empty.
        sequences: how many, evenly spread over all held-out ones; 0: all.
        group: sequences of each `step-N` of the store, which are in memory at a time.
        edits: names of the edits that are on.

    Returns:
        The number of sequences.

    Raises:
        JobError: the data has no held-out part, or `out` has files or cannot be written.
    """
    recorder, dataset = recorder_of(trained.model), _held_out(trained)
    info = recorder.agree()
    if global_rank() == 0:
        # The manifests of the store have the digest of this file
        (new_folder(out, "--out") / JOB).write_text(dump_job(trained.job))
    gather_objects(None)  # the folder is there
    # The store belongs to `out` and not to the run
    context = attrs.evolve(trained.context, folder=out)
    # A store is all that the command makes, so an error ends it.
    sink, executor = StoreWriter(Store(on_error="fail"), context, info), executor_of(trained)
    sink.start(0)
    count = min(sequences or len(dataset), len(dataset))
    # Evenly spread, as neighbouring sequences may be of one document
    drawn = [number * len(dataset) // count for number in range(count)]
    for number, start in enumerate(range(0, count, group), 1):
        chosen = drawn[start : start + group]
        batches = list(_batches(trained, dataset, chosen))
        recorder.begin(number, [row for rows, _ in batches for row in rows], len(chosen))
        with recorder.editing(edits):
            executor.evaluate([batch for _, batch in batches], _nothing)
        sink.consume(recorder.end())
        # At once and not a step later, as in training: the next group takes the memory
        sink.settle()
    sink.close(final=True)
    return count


def _held_out(trained: TrainedModel) -> Dataset:
    """Returns the held-out sequences of the run's job."""
    context: Any = attrs.evolve(trained.context, tokenizer=trained.tokenizer)
    dataset = held_out(build_datasets(trained.job, context))
    if dataset is None:
        hint = "set a source's share that is held out (--data.sources.0.held_out_every=100, say)"
        raise JobError([Problem("data.sources", f"there are no held-out sequences to read; {hint}")])
    return dataset


def _batches(trained: TrainedModel, dataset: Dataset, chosen: Sequence[int]) -> Iterator[tuple[list[int], Batch]]:
    """Yields this rank's micro-batches of some sequences, with the numbers of rows among them."""
    context, job = trained.context, trained.context.job
    ranks, size = context.layout.data_parallel, micro_batches(job, context.layout)[1]
    rank = sample_rank(context.mesh, context.layout)
    for start in range(0, len(chosen), ranks * size):
        # Every rank has equally many batches of equal shape, or collectives would hang. The last sequence fills them
        # up: it is written twice, with the same values.
        first = start + rank * size
        rows = [min(row, len(chosen) - 1) for row in range(first, first + size)]
        batch = collate([dataset[chosen[row]] for row in rows], trained.job.model.batch_fields(trained.job))
        yield rows, {name: tensor.to(context.device, non_blocking=True) for name, tensor in batch.items()}


def _nothing(head: Any, hidden: Tensor, batch: Batch) -> LossOutput:  # noqa: ARG001
    """In place of a loss, which would need the head."""
    zeros = hidden.new_zeros(len(batch["input_ids"]), dtype=torch.float64)
    return LossOutput(zeros.sum(), zeros.sum().long(), (zeros, zeros))
