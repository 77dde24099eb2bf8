"""What a picture of a sample shows: facts, faults, images and clips, and the row with its positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen

from forge_core.contracts.layout import Layout
from forge_core.engine.build import build_bare_model
from forge_core.parallel.initialise import bare_context
from forge_kit.data.job_data import JobData
from forge_plugin_plan.data_view.decoding import Decoder
from forge_plugin_plan.data_view.row_text import Piece, pieces_of
from forge_plugin_plan.data_view.samples import Sample
from forge_plugin_plan.data_view.visuals import GRIDS, PATCHES, SECONDS, Visual, faults_of, visuals_of

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch, SampleRow
    from forge_plugin_vision import ImageInput

COORDINATES = "positions_3d"
"""Entry (B, S, 3) that models with `mrope` make of a batch: see `forge_plugin_vision.modules.mrope`."""
TEXT_ENTRIES = ("input_ids", "labels", "sources", "slots", "numbers", "document_ids", "positions")


@frozen(kw_only=True, eq=False)
class PositionIds:
    """PositionIds of a row of one kind, as the language model encodes them."""

    name: str
    values: np.ndarray
    """(S,), or (S, 3): frame, row and column."""

    def at(self, position: int) -> str:
        """Returns the coordinates at a position, or one number if they are equal, as for a token; empty if negative."""
        if position < 0:
            return ""
        each = [int(value) for value in np.atleast_1d(self.values[position])]
        return str(each[0]) if len({*each}) == 1 else " ".join(map(str, each))

    def range(self, positions: np.ndarray) -> str:
        """Returns the positions of the first and the last position."""
        first, last = (
            " ".join(map(str, np.atleast_1d(self.values[position]).tolist())) for position in positions[[0, -1]]
        )
        return f"{self.name} {first}" if len(positions) == 1 else f"{self.name} {first} to {last}"


@frozen(kw_only=True, eq=False)
class Sheet:
    """A sample, ready to be drawn."""

    title: str
    facts: Sequence[tuple[str, str]]
    faults: Sequence[str]
    """Problems of the sample."""
    visuals: Sequence[Visual]
    pieces: Sequence[Piece]
    left_out: int
    """Tokens that are not in `pieces`."""
    position_ids: Sequence[PositionIds]
    """The first has the positions of the row themselves."""

    @classmethod
    def of(cls, data: JobData, number: int, most: int) -> Sheet:
        """Read a sample.

        Args:
            data: the data of the job.
            number: of the sequence in the run, from 0.
            most: tokens to show; 0: all.

        Raises:
            DataError: it cannot be read.
        """
        row, where, batch = data.sequence(number)
        decoder = Decoder(data.tokenizer)
        sample = Sample.of(batch, decoder.end_of_text, data.starts(row))
        entries = {name: tensor[0].numpy() for name, tensor in batch.items()}
        seen = _image_input(data, batch)
        visuals = [] if seen is None else visuals_of(entries, seen)
        faults = [] if seen is None else [*faults_of(entries, visuals, seen)]
        # Only a note: some objectives have other labels on purpose
        if not sample.shifted():
            faults.append("some labels are not the next input: the dataset has its own targets, or shifts them wrongly")
        pieces, left_out = pieces_of(sample, decoder, visuals, most)
        return cls(
            title=_title(data, number, row),
            facts=[("from", where), *_facts(sample, visuals, batch)],
            faults=faults,
            visuals=visuals,
            pieces=pieces,
            left_out=left_out,
            position_ids=[*_position_ids(data, batch, bool(visuals))],
        )


def _image_input(data: JobData, batch: Batch) -> ImageInput | None:
    """Returns what the model sees; None where rows have no images, or the model sees none."""
    # Without the plugin `vision`, no model can have an image input
    if PATCHES not in batch or GRIDS not in batch or find_spec("forge_plugin_vision") is None:
        return None
    from forge_plugin_vision import HasImageInput

    return data.job.model.image_input() if isinstance(data.job.model, HasImageInput) else None


def _title(data: JobData, number: int, row: SampleRow) -> str:
    step = data.job.train.steps_until(number + 1)
    return (
        f"{data.job.job.name}: sample {number:,} (row {row.slot} of step {step:,}), source {data.names[row.source]!r}"
    )


def _facts(sample: Sample, visuals: Sequence[Visual], batch: Batch) -> Iterator[tuple[str, str]]:
    fill = sample.fill
    unlearned = fill.ignored - fill.padding
    yield (
        "positions",
        f"{fill.positions:,}: {fill.learned:,} with a label, {unlearned:,} without, {fill.padding:,} padding",
    )
    documents = {token.document for token in sample.tokens()}
    apart = "" if sample.documents is None else ", kept apart: attention stays within each"
    yield "documents", f"{len(documents):,}{apart}"
    if visuals:
        clips = sum(visual.is_clip for visual in visuals)
        room = f"of {batch[GRIDS].shape[1]:,} together"
        yield "images and clips", f"{len(visuals) - clips:,} and {clips:,} {room}"
        used = sum(visual.grid.patches for visual in visuals)
        yield "patches", f"{used:,} of {batch[PATCHES].shape[1]:,}"
    for name, tensor in batch.items():
        if name not in (*TEXT_ENTRIES, PATCHES, GRIDS, SECONDS):
            yield name, _value(tensor[0])


def _value(tensor: torch.Tensor) -> str:
    """A number, a few numbers, or a shape."""
    if tensor.numel() <= 8:
        return str(tensor.tolist())
    return " x ".join(map(str, tensor.shape))


def _position_ids(data: JobData, batch: Batch, has_visuals: bool) -> Iterator[PositionIds]:
    yield PositionIds(name="position", values=np.arange(batch["input_ids"].shape[1]))
    if "positions" in batch:
        yield PositionIds(name="position id", values=batch["positions"][0].numpy())
    if has_visuals and (coordinates := _prepared(data, batch).get(COORDINATES)) is not None:
        yield PositionIds(name="t h w", values=coordinates[0].numpy())


def _prepared(data: JobData, batch: Batch) -> Batch:
    """Returns the batch with what the model adds to it before it divides or embeds it: arithmetic without weights."""
    # Only kernels are chosen by the device, which need not be here.
    device = torch.device("cpu" if data.job.train.device == "cpu" else "cuda")
    context = bare_context(data.job, Layout(), data.catalog, device, data.tokenizer)
    return build_bare_model(data.job, context)[0].prepare_sequences(batch)
