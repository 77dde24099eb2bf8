"""What becomes of rows: their entries, dtypes and shapes, in training and in evaluation."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from attrs import evolve, frozen

from forge_core.contracts.components import DatasetComponent
from forge_core.contracts.errors import CheckpointError, DataError
from forge_core.data.loader import TrainLoader, evaluation_batches, held_out
from forge_core.data.order import sample_order
from forge_core.data.reading import collate
from forge_core.job import Phase
from forge_testing import Numbers
from forge_testing.refusals import naming
from forge_testing.tiny import NumberSequences


def row(**entries):
    return {"input_ids": np.arange(3), "labels": np.arange(3), **entries}


class TestCollate:
    def test_tokens_are_int64_and_other_entries_keep_their_dtype(self):
        pixels, weights = np.zeros((2, 2), np.uint8), np.zeros(3, np.float16)
        small = {name: np.arange(3, dtype=np.uint16) for name in ("input_ids", "labels", "positions", "document_ids")}
        batch = collate([{**small, "pixels": pixels, "weights": weights}] * 2)
        assert {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in batch.items()} == {
            **dict.fromkeys(small, "int64"),
            "pixels": "uint8",
            "weights": "float16",
        }
        assert batch["pixels"].shape == (2, 2, 2)

    def test_tokens_of_different_width_go_together(self):
        batch = collate([row(), row(input_ids=np.arange(3, dtype=np.uint8))])
        assert batch["input_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]

    @pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
    def test_an_entry_that_only_some_rows_have_is_an_error_in_any_order(self, order):
        rows = [row(), row(pixels=np.zeros(2, np.uint8))][order]
        with pytest.raises(DataError, match=naming("'pixels'", "uint8 (2,)", "row 0", "row 1")):
            collate(rows)

    @pytest.mark.parametrize("other", [np.zeros(3, np.uint8), np.zeros(2, np.float32)])
    def test_rows_that_differ_in_shape_or_dtype_are_an_error(self, other):
        shape = f"{other.dtype} ({len(other)},)"
        with pytest.raises(DataError, match=naming("'pixels'", "uint8 (2,)", "row 0", shape, "row 1")):
            collate([row(pixels=np.zeros(2, np.uint8)), row(pixels=other)])


@frozen(kw_only=True)
class WithPixels(Numbers):
    def build(self, context):
        class Sequences(NumberSequences):
            def __getitem__(self, index):
                return {**super().__getitem__(index), "pixels": np.full((4, 4), index, np.uint8)}

        return Sequences(8, 8, 1, 0)


def test_sources_whose_entries_differ_are_named(make_job, build):
    run = build(job := make_job(data={"sources": (WithPixels(name="images"), Numbers(name="text"))}))
    loader = TrainLoader(job, run.datasets, run.context)
    with pytest.raises(DataError, match=naming("'pixels'", "uint8 (4, 4)", "source 'images'", "source 'text'")):
        loader.next_step()
    loader.close()


# --- held-out sequences ------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Known(Numbers):
    """Held-out sequences of one id, and its bytes a token."""

    id: int
    rate: float

    def build(self, context):
        held = HeldOutOf(self.id, self.rate, self.held_out)
        return NumberSequences(self.sequences, 8, self.ignored, self.start, held)


@frozen
class HeldOutOf:
    id: int
    bytes_per_token: float
    count: int
    held_out: None = None

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        tokens = np.full(8, self.id)
        labels = np.where(np.arange(8) < (8 if self.id < 20 else 2), tokens, -100)
        return {"input_ids": tokens, "labels": labels}


SOURCES = (Known(id=3, rate=2.0, held_out=12), Known(id=30, rate=6.0, held_out=4, start=100))


def test_held_out_sequences_are_spread_over_all_sources(make_job, build):
    run = build(job := make_job(data={"sources": SOURCES}))
    drawn = [
        int(row[0]) for b in evaluation_batches(held_out(run.datasets), 4, job, run.context) for row in b["labels"]
    ]
    assert drawn == [3, 3, 3, 30]
    whole = [
        int(row[0]) for b in evaluation_batches(held_out(run.datasets), 0, job, run.context) for row in b["labels"]
    ]
    assert whole == [3] * 12 + [30] * 4


def test_bits_per_byte_weigh_the_sources_by_the_tokens_that_were_evaluated(make_job, train):
    evaluated = {"held_out": evolve(make_job().evaluations["held_out"], sequences=4)}
    metrics = train(make_job(data={"sources": SOURCES}, evaluations=evaluated)).evaluation
    tokens = 3 * 8 + 2
    assert metrics["eval/tokens"] == tokens
    per_token = (3 * 8 * 2.0 + 2 * 6.0) / tokens
    assert metrics["eval/bits_per_byte"] == pytest.approx(metrics["eval/loss"] / math.log(2) / per_token)


# --- the position ------------------------------------------------------------------------------------------------


def test_a_save_counts_no_sample_again(make_job, build, monkeypatch):
    """The position is that of an order that went through all samples, in any phase, and is read at once."""
    data = {"sources": (Numbers(name="a"), Numbers(name="b")), "phases": (Phase(start_step=3, weights={"b": 0.0}),)}
    run = build(job := make_job(steps=8, data=data))
    loader = TrainLoader(job, run.datasets, run.context)
    for step in range(1, 7):
        loader.next_step()
        order = sample_order(job, [64, 64])
        order.advance(4 * step)
        assert loader.state() == order.state()
    monkeypatch.setattr("forge_core.data.order.SampleOrder.advance", None)
    monkeypatch.setattr("forge_core.data.order.SampleOrder.state", None)
    assert loader.state()["drawn"] == 24
    monkeypatch.undo()
    loader.close()


# --- what a source holds -----------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Stored(DatasetComponent):
    def build(self, context):
        return StoredSequences(64, 8, 1, 0)


class StoredSequences(NumberSequences):
    content = "first"

    def identity(self):
        return self.content


def test_a_source_whose_content_was_exchanged_needs_the_flag(make_job, train, monkeypatch):
    """Its size is the same, and so is the job."""
    data = {"sources": (Stored(name="web"),)}
    train(make_job(steps=2, data=data))
    assert train(make_job(steps=3, data=data)).step == 3
    monkeypatch.setattr(StoredSequences, "content", "second")
    with pytest.raises(CheckpointError, match=naming("source 'web'", "content", "--resume-with-changes")):
        train(make_job(steps=4, data=data))
    assert train(make_job(steps=4, data=data), resume_with_changes=True).step == 4


def test_the_position_with_identities_is_plain_json(make_job, build):
    run = build(job := make_job(data={"sources": (Stored(), Numbers())}))
    loader = TrainLoader(job, run.datasets, run.context)
    state = loader.state()
    loader.close()
    assert json.loads(json.dumps(state)) == state
    assert state["sources"]["0"]["identity"] == "first"
    assert "identity" not in state["sources"]["1"]
