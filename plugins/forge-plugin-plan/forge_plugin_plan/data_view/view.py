"""Facts about the data of a job: its sources, how full sequences are, and some samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import asdict, frozen

from forge_core.contracts.data import Dataset, HasDescription
from forge_core.contracts.errors import JobError
from forge_kit.data.data_files import ListsFiles
from forge_kit.data.job_data import JobData, Passage, ends_of
from forge_plugin_plan.data_view.decoding import Decoder
from forge_plugin_plan.data_view.samples import Fill, Sample, Stretch, image_names

MEASURED_DOCUMENTS = 1_000_000
"""Documents of a source whose lengths are read at most; of more, so many are taken evenly."""


@frozen(kw_only=True)
class Lengths:
    """Tokens of the documents of a source, end-of-text included."""

    documents: int
    """How many documents were measured."""
    median: int
    longest: int
    bins: Sequence[tuple[int, int]]
    """(upper bound, documents with at most so many tokens and more than the bound before); bounds are powers of two."""

    @classmethod
    def of(cls, ends: np.ndarray) -> Lengths | None:
        """Measure documents by their ends (see `Documents.ends`); None if there are none."""
        if not len(ends):
            return None
        # Evenly over the source, whose documents may be sorted by length
        chosen = np.linspace(0, len(ends) - 1, min(len(ends), MEASURED_DOCUMENTS)).astype(np.int64)
        # A document begins where the one before it ends, the first one at 0
        lengths = np.asarray(ends[chosen]) - np.where(chosen > 0, ends[np.maximum(chosen - 1, 0)], 0)
        # At least 1, as an empty document has no logarithm
        powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
        counts = np.bincount(powers)
        first = int(powers.min())
        bins = [(2**power, int(count)) for power, count in enumerate(counts) if power >= first]
        return cls(documents=len(chosen), median=int(np.median(lengths)), longest=int(lengths.max()), bins=bins)


@frozen(kw_only=True)
class SourceView:
    """One source of a job. None where it is not known, as of a stream."""

    name: str
    type: str
    description: str
    """The dataset's description of itself; empty if it has none."""
    rows: str
    """What became of the rows of the source, as its component describes them before they are packed; may be empty."""
    learned: float | None
    """Share of the positions that are learned, over the measured samples; None: none is of this source."""
    documents: int | None
    tokens: int | None
    """Tokens to train on."""
    sequences: int | None
    held_out: int | None
    """Held-out sequences; None: none."""
    draws: float
    """Sequences that the run takes from it."""
    share: float
    """Their share of all samples of the run."""
    epochs: float | None
    lengths: Lengths | None
    left_out: Mapping[str, int]
    """What its folders hold and is no data of it, with how often."""


@frozen(kw_only=True)
class ShownSample:
    """A sample that was asked for."""

    number: int
    """Within the global batch, from 0."""
    source: str
    where: str
    sample: Sample
    runs: Sequence[Stretch]
    passages: Sequence[Passage]
    """Of its documents, in order; none where these are not known."""
    left_out: int
    """Tokens that are not in `runs`."""
    left_out_learned: int

    @property
    def images(self) -> list[str]:
        """Placeholders of the image runs, in order."""
        return image_names(self.runs, self.sample.grids)


@frozen(kw_only=True)
class View:
    """Everything that the command shows."""

    data: JobData
    step: int
    decoder: Decoder
    sources: Sequence[SourceView]
    measured: int
    """Samples over which `fill` is counted."""
    fill: Fill
    shifted: bool
    """Whether the labels of all these are the next inputs."""
    samples: Sequence[ShownSample]
    documents: Mapping[int, Sequence[Passage]]
    """Of all samples of the step, by their numbers, if that was asked for."""

    @classmethod
    def of(
        cls, data: JobData, step: int, numbers: Sequence[int], measure: int, most: int, documents: bool = False
    ) -> View:
        """Read the samples.

        Args:
            data: the data of the job.
            step: step of the run, from 1.
            numbers: samples of the step to show.
            measure: samples over which to count positions.
            most: tokens to show of each sample; 0: all.
            documents: whether to list the documents of all samples of the step.

        Raises:
            JobError: the documents are asked for, and not known of any sample.
        """
        decoder = Decoder(data.tokenizer)
        fill, shifted, measured, shown = Fill(), True, 0, {}
        fills: dict[int, Fill] = {}
        # One pass for counts and shown samples: a stream is read from its start in each pass
        for number, (row, where, batch) in enumerate(data.read(step, max(measure, max(numbers) + 1))):
            sample = Sample.of(batch, decoder.end_of_text, data.starts(row))
            if number < measure:
                fill, shifted, measured = fill + sample.fill, shifted and sample.shifted(), measured + 1
                fills[row.source] = fills.get(row.source, Fill()) + sample.fill
            if number in numbers:
                shown[number] = _shown(number, data.names[row.source], where, sample, most, data.passages(row))
        listed = dict(_documents(data, step)) if documents else {}
        return cls(
            data=data,
            step=step,
            decoder=decoder,
            sources=describe_sources(data, fills),
            measured=measured,
            fill=fill,
            shifted=shifted,
            # In the order of the command line
            samples=[shown[number] for number in numbers],
            documents=listed,
        )

    def as_json(self) -> dict[str, Any]:
        """Returns everything as plain types."""
        job = self.data.job
        counts = {"positions": self.fill.positions, "learned": self.fill.learned, "ignored": self.fill.ignored}
        return {
            "steps": job.train.steps,
            "global_batch_size": job.train.global_batch_size,
            "seq_len": job.train.seq_len,
            "vocab_size": None if self.data.tokenizer is None else self.data.tokenizer.vocab_size,
            "sources": [asdict(source) for source in self.sources],
            "fill": {"samples": self.measured, **counts, "padding": self.fill.padding},
            "labels_are_next_inputs": self.shifted,
            "step": self.step,
            "samples": [self._sample_json(sample) for sample in self.samples],
            "documents": [
                {"sample": number, **passage.as_json()}
                for number, passages in self.documents.items()
                for passage in passages
            ],
        }

    def _sample_json(self, shown: ShownSample) -> Mapping[str, Any]:
        images = iter(shown.images)
        runs = [
            {
                "kind": run.kind,
                "learned": run.learned,
                "document": None if run.kind == "padding" else run.document,
                "positions": len(run.ids),
                "text": next(images) if run.kind == "image" else self.decoder.text(run.ids) * (run.kind == "text"),
                # Texts may have the name of a special token in them, too
                "pieces": self._pieces(run.ids) if run.kind == "text" else [],
                "ids": list(run.ids) if run.kind == "text" else [],
            }
            for run in shown.runs
        ]
        fill = shown.sample.fill
        return {
            "sample": shown.number,
            "source": shown.source,
            "where": shown.where,
            "positions": fill.positions,
            "learned": fill.learned,
            "padding": fill.padding,
            "images": [list(grid) for grid in shown.sample.grids],
            "entries": {name: list(shape) for name, shape in shown.sample.shapes.items()},
            "left_out": shown.left_out,
            "runs": runs,
            "documents": [passage.as_json() for passage in shown.passages],
        }

    def _pieces(self, ids: Sequence[int]) -> list[Mapping[str, Any]]:
        return [{"text": text, "special": is_special} for text, is_special in self.decoder.pieces(ids)]


def _documents(data: JobData, step: int) -> Iterator[tuple[int, Sequence[Passage]]]:
    """Yields the number and the documents of each sample of a step. No token is read."""
    found = False
    for number, passages in data.passages_of(step):
        found = found or bool(passages)
        yield number, passages
    if not found:
        fix = "the packings concatenate, isolate and best_fit know them, of sources that are no streams"
        raise JobError(f"--documents: it is not known of which documents the samples of step {step} are made; {fix}")


def _shown(number: int, source: str, where: str, sample: Sample, most: int, passages: Sequence[Passage]) -> ShownSample:
    runs, rest = sample.runs(most)
    return ShownSample(
        number=number,
        source=source,
        where=where,
        sample=sample,
        runs=runs,
        passages=passages,
        left_out=len(rest),
        left_out_learned=sum(token.learned for token in rest),
    )


def describe_sources(data: JobData, fills: Mapping[int, Fill]) -> list[SourceView]:
    """Returns the facts of each source; `fills` are of its measured samples, by its number."""
    draws = data.draws()
    total = sum(draws)
    return [
        _source(data, number, dataset, size, drawn, drawn / total, fills.get(number))
        for number, (dataset, size, drawn) in enumerate(zip(data.datasets, data.sizes, draws, strict=True))
    ]


def _source(
    data: JobData, number: int, dataset: Any, size: int | None, drawn: float, share: float, fill: Fill | None
) -> SourceView:
    documents = data.documents.get(number)
    ends = None if documents is None else ends_of(documents)
    held_out: Dataset | None = dataset.held_out
    component, built = data.job.data.sources[number], data.built.get(number)
    return SourceView(
        name=data.names[number],
        type=data.catalog.type_of(type(component)),
        description=dataset.describe() if isinstance(dataset, HasDescription) else "",
        rows=built.describe() if built is not dataset and isinstance(built, HasDescription) else "",
        learned=fill.learned / fill.positions if fill else None,
        documents=None if ends is None else len(ends),
        tokens=None if documents is None else len(documents),
        sequences=size,
        held_out=None if held_out is None else len(held_out),
        # Expected numbers, which are right to within a few sequences
        draws=round(drawn, 1),
        share=share,
        epochs=drawn / size if size else None,
        lengths=None if ends is None else Lengths.of(ends),
        left_out=component.left_out() if isinstance(component, ListsFiles) else {},
    )
