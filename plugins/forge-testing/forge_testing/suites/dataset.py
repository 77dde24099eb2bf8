"""Contract of every dataset, as tests. Shapes: S positions of a sequence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import torch

from forge_core.checkpoint.state import Progress
from forge_core.contracts.components import DatasetComponent
from forge_core.contracts.data import IGNORED_LABEL, Batch, Dataset, Documents, Stream
from forge_core.data.loader import TrainLoader
from forge_core.engine.build import build_datasets, build_tokenizer
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_core.plugins.manager import RunContext
from forge_testing.suites.base import Suite, explained

Sample = Mapping[str, np.ndarray]
COMPARED = 512
"""Upper bound of the sequences that are compared."""


class DatasetSuite(Suite):
    """Determinism, shifted labels, positions, workers, documents and streams, if the built object has them.

        class TestText(DatasetSuite):
            job = {"data": {"tokenizer": Bytes()}}

            def make(self, folder):
                (folder / "a.txt").write_text("some text " * 50)
                return Text(path=str(folder / "a.txt"))

    `make` is called once a test. The data must have at least 8 sequences of `train.seq_len`, which is 8.
    """

    component: ClassVar[DatasetComponent]
    steps: ClassVar[int] = 6
    """Steps of 4 sequences that are loaded."""
    one_thread: ClassVar[bool] = False
    """Whether the job has a loader that refuses `data.workers`."""
    has_images: ClassVar[bool] = False
    """Whether `input_ids` may be negative: positions of images, which are no tokens."""

    # --- sequences -----------------------------------------------------------------------------------------------

    def test_building_it_again_gives_the_same(self, tmp_path: Path) -> None:
        """The same sequences in the same order, independent of earlier reads."""
        job = self._job(tmp_path)
        first, second = self._build(job), self._build(job)
        if not isinstance(first, Stream):
            assert len(first) == len(second), (
                f"built twice, it has {len(first)} and {len(second)} sequences; every rank and every continued run "
                "builds it again, so it must depend on the data and the job alone"
            )
        pairs = zip(_samples(first), _samples(second), strict=True)
        for number, (one, other) in enumerate(pairs):
            assert _equal(one, other), (
                f"built twice, its sequence {number} differs: {_shown(one)} and {_shown(other)}; read in a fixed "
                "order, and draw nothing from a generator that is not seeded from the job"
            )

    def test_reading_a_sequence_changes_nothing(self, tmp_path: Path) -> None:
        """Neither reading it again nor writing into the arrays that it returned."""
        data = self._build(self._job(tmp_path))
        if isinstance(data, Stream):
            pytest.skip("a stream returns each sequence once")
        before = {name: value.copy() for name, value in data[0].items()}
        for value in data[0].values():
            if value.flags.writeable:
                value[...] = 0
        data[len(data) - 1]
        assert _equal(data[0], before), (
            f"sequence 0 was {_shown(before)} and is now {_shown(data[0])}, after others were read and what was given "
            "was written into; return copies, and keep no position between reads"
        )

    def test_labels_are_shifted_and_of_the_length_of_the_job(self, tmp_path: Path) -> None:
        """`labels[t]` is the target of position t, the next token: the dataset shifts, and nothing else does."""
        job = self._job(tmp_path)
        context = self._context(job)
        for number, sample in enumerate(_samples(self._build(job, context))):
            missing = {"input_ids", "labels"} - sample.keys()
            assert not missing, f"sequence {number} has no {' and no '.join(sorted(missing))}"
            ids, labels = np.asarray(sample["input_ids"]), np.asarray(sample["labels"])
            for name, value in (("input_ids", ids), ("labels", labels)):
                wanted = (job.train.seq_len,)
                assert value.shape == wanted, f"{name} of sequence {number} have the shape {value.shape}, not {wanted}"
                assert value.dtype.kind in "iu", f"{name} of sequence {number} are {value.dtype}; they must be integers"
            _check_ids(number, ids[ids >= 0] if self.has_images else ids, labels, context)
            learned = labels[:-1] != IGNORED_LABEL
            wrong = np.flatnonzero(learned & (labels[:-1] != ids[1:]))
            assert not len(wrong), (
                f"sequence {number}: the label of position {wrong[0]} is {labels[wrong[0]]}, and the next token is "
                f"{ids[wrong[0] + 1]}; labels[t] must be the token after input_ids[t], or {IGNORED_LABEL}"
            )

    def test_what_is_held_out_is_fixed(self, tmp_path: Path) -> None:
        """Sequences of the form of training's, the same each time."""
        job = self._job(tmp_path)
        context = self._context(job)
        held, again = self._build(job, context).held_out, self._build(job, context).held_out
        if held is None or again is None:
            assert held is again, "built twice, only one of the two has held-out sequences"
            pytest.skip("it holds nothing out")
        assert len(held) == len(again), f"built twice, it holds out {len(held)} and {len(again)} sequences"
        for number in range(min(len(held), 8)):
            assert _equal(held[number], again[number]), f"built twice, held-out sequence {number} differs"
            shape = np.asarray(held[number]["labels"]).shape
            assert shape == (job.train.seq_len,), f"labels of held-out sequence {number} have the shape {shape}"

    def test_what_is_held_out_is_not_trained_on(self, tmp_path: Path) -> None:
        """Otherwise a held-out loss would measure memorised sequences."""
        data = self._build(self._job(tmp_path))
        if data.held_out is None or not len(data.held_out):
            pytest.skip("it holds nothing out")
        held = {_content(data.held_out[number]) for number in range(min(len(data.held_out), COMPARED))}
        if isinstance(data, Stream):
            trained = {_content(s) for lane in range(data.lanes) for s, _ in islice(data.read(lane, None), COMPARED)}
        else:
            trained = {_content(data[number]) for number in range(min(len(data), COMPARED))}
        assert held - trained, (
            f"all of the first {len(held)} held-out sequences are trained on too; hold out sequences that training "
            "never reads (if the data of this test repeats itself, give the suite some that does not)"
        )

    # --- positions -----------------------------------------------------------------------------------------------

    def test_a_run_that_continues_gets_the_sequences_that_come_next(self, tmp_path: Path) -> None:
        """From a position that was encoded to JSON, as it is saved."""
        job = self._job(tmp_path)
        whole, _ = self._load(job, self.steps)
        cut = self.steps // 2
        first, position = self._load(job, cut)
        with explained(f"the position {position} is not plain JSON"):
            text = json.dumps(position)
        rest, _ = self._load(job, self.steps - cut, Progress(step=cut, samples=json.loads(text)))
        self._compare([*first, *rest], whole, f"a run that continues after step {cut}", "keep all of it in `position`")

    def test_workers_change_nothing(self, tmp_path: Path) -> None:
        """Two processes load the same batches as none. Needs forge-plugin-torchdata."""
        if self.one_thread:
            pytest.skip("the loader of the job reads without workers")
        job = self._job(tmp_path)
        if job.data.loader is None and "nodes" not in Catalog.installed().types("loader"):
            pytest.skip("forge-plugin-torchdata, which has the loader of data.workers, is not installed")
        alone, _ = self._load(job, self.steps)
        with_workers = attrs.evolve(job, data=attrs.evolve(job.data, workers=2))
        with explained("loading by two worker processes fails"):
            actual, _ = self._load(with_workers, self.steps)
        self._compare(actual, alone, "with data.workers = 2, the run", "share nothing between reads")

    # --- documents -----------------------------------------------------------------------------------------------

    def test_documents_are_one_row_of_tokens(self, tmp_path: Path) -> None:
        """Slices agree with the whole, ends ascend to T, and each document ends with end-of-text."""
        job = self._job(tmp_path)
        built = self._raw(job)
        if not isinstance(built, Documents):
            pytest.skip("it has no documents")
        for name, documents in (("", built), ("held_out: ", built.held_out)):
            if documents is not None:
                _check_documents(name, documents)

    def test_lanes_of_a_stream_are_independent(self, tmp_path: Path) -> None:
        """The samples of a lane are a function of its number and position, independent of other lanes."""
        job = self._job(tmp_path)
        stream = self._build(job)
        if not isinstance(stream, Stream):
            pytest.skip("it is no stream")
        alone = [list(islice(stream.read(lane, None), 6)) for lane in range(stream.lanes)]
        lanes = [stream.read(lane, None) for lane in range(stream.lanes)]
        for number in range(6):
            for lane, reader in enumerate(lanes):
                sample, position = next(reader)
                assert _equal(sample, alone[lane][number][0]), (
                    f"lane {lane} returns another sequence {number} when the lanes are read in turns"
                )
                with explained(f"lane {lane}: its position {position} is not plain JSON"):
                    position = json.loads(json.dumps(position))
                if number < 5:
                    following = next(stream.read(lane, position))[0]
                    assert _equal(following, alone[lane][number + 1][0]), (
                        f"lane {lane}, read from the position after sequence {number}, does not return the next one"
                    )

    # --- surroundings --------------------------------------------------------------------------------------------

    def _job(self, folder: Path) -> Job:
        return self.tiny_job(folder, data={"sources": (self.make(folder),)}, steps=self.steps)

    def _context(self, job: Job) -> RunContext:
        context = self.context(job)
        return attrs.evolve(context, tokenizer=build_tokenizer(job, context))

    def _build(self, job: Job, context: RunContext | None = None) -> Any:
        [data] = build_datasets(job, context or self._context(job))
        return data

    def _raw(self, job: Job) -> Any:
        return self._context(job).build(job.data.sources[0])

    def _load(self, job: Job, steps: int, progress: Progress | None = None) -> tuple[list[Batch], Mapping[str, Any]]:
        context = self._context(job)
        loader = TrainLoader(job, build_datasets(job, context), context, progress)
        try:
            return [loader.next_step()[0] for _ in range(steps)], loader.state()
        finally:
            loader.close()

    def _compare(self, actual: Sequence[Batch], expected: Sequence[Batch], what: str, hint: str) -> None:
        for step, (one, other) in enumerate(zip(actual, expected, strict=True), 1):
            for name in other:
                same = name in one and torch.equal(one[name], other[name])
                assert same, f"{what} gets other `{name}` in step {step} than one that was not interrupted; {hint}"


def _samples(data: Dataset | Stream) -> list[Sample]:
    """Return some sequences: of each lane of a stream, or the first, the last and some between."""
    if isinstance(data, Stream):
        return [sample for lane in range(data.lanes) for sample, _ in islice(data.read(lane, None), 4)]
    numbers = sorted({*range(min(4, len(data))), len(data) // 2, len(data) - 1})
    return [data[number] for number in numbers]


def _check_ids(number: int, ids: np.ndarray, labels: np.ndarray, context: RunContext) -> None:
    size = context.tokenizer.vocab_size if context.tokenizer is not None else None
    for name, actual in (("input_ids", ids), ("labels", labels[labels != IGNORED_LABEL])):
        outside = actual[(actual < 0) | (actual >= (size or np.inf))]
        allowed = f"0 to {size - 1}" if size else "0 or more"
        assert not len(outside), f"{name} of sequence {number} have the id {outside[0]}; allowed is {allowed}"


def _check_documents(name: str, documents: Documents) -> None:
    total = len(documents)
    whole = documents.tokens(0, total).copy()
    assert whole.dtype == np.int64, f"{name}tokens are {whole.dtype}, not int64"
    assert whole.shape == (total,), f"{name}tokens(0, {total}) has the shape {whole.shape}"
    middle = total // 2
    parts = np.concatenate([documents.tokens(0, middle), documents.tokens(middle, total)])
    assert np.array_equal(parts, whole), f"{name}two slices together differ from one slice over both"
    slice_ = documents.tokens(0, middle)
    slice_[...] = -1
    assert np.array_equal(documents.tokens(0, middle), whole[:middle]), f"{name}tokens returns no copy: writing shows"
    ends = np.asarray(documents.ends())
    ascending = len(ends) and bool((np.diff(ends) > 0).all()) and ends[0] > 0 and ends[-1] == total
    assert ascending, f"{name}ends() must ascend to T = {total}, and is {ends[:4]} … {ends[-1:]}"
    last = whole[ends - 1]
    assert bool((last == documents.end_of_text).all()), (
        f"{name}document {int(np.flatnonzero(last != documents.end_of_text)[0])} does not end with end_of_text"
    )
    learned = documents.learned(0, total)
    assert learned is None or (learned.shape == (total,) and learned.dtype == bool), (
        f"{name}learned(0, {total}) must be None or (T,) bool"
    )
    assert isinstance(documents.where(0, 1), str), f"{name}where(0, 1) must be a text that names the place"


def _content(sample: Sample) -> bytes:
    """Return the tokens of a sequence, as bytes."""
    return np.asarray(sample["input_ids"]).astype(np.int64).tobytes()


def _equal(one: Sample, other: Sample) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def _shown(sample: Sample) -> str:
    return np.array2string(np.asarray(sample["input_ids"])[:8], separator=", ")
