"""Windows over documents: every token is used once, wherever the windows begin and end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.contracts.data import Stream
from forge_core.data.packing import Concatenate, WindowPacking
from forge_core.data.windows import HeldOutWindows, TrainingWindows, Window
from forge_kit.data.document_streams import DocumentStream, StreamedDocument, StreamWindows
from forge_testing.documents import END, ListedDocuments

IGNORED = -100


@frozen(kw_only=True)
class Shown(WindowPacking):
    """Returns windows as they are."""

    def sequence(self, window: Window) -> Mapping[str, np.ndarray]:
        sample = {"tokens": window.tokens, "starts": window.starts}
        return sample if window.learned is None else sample | {"learned": window.learned}


documents = st.lists(st.lists(st.integers(0, END - 1), max_size=12), min_size=1, max_size=10)
lengths = st.integers(1, 9)
unhurried = settings(deadline=None)


@st.composite
def masked(draw: Any) -> tuple[list[list[int]], list[list[bool]]]:
    """Documents, and which of their ids are learned."""
    found = draw(documents)
    return found, [draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))) for ids in found]


def flat(found: list[list[int]]) -> list[int]:
    """The documents one after the other, each with its end."""
    return [id_ for ids in found for id_ in (*ids, END)]


def first_tokens(found: list[list[int]]) -> list[bool]:
    """Which tokens of `flat` begin a document."""
    return [number == 0 for ids in found for number in range(len(ids) + 1)]


def learned_labels(found: list[list[int]], masks: list[list[bool]]) -> list[int]:
    """The tokens of `flat`, those that are not learned ignored."""
    kept = [mask for row in masks for mask in (*row, True)]
    return [id_ if keep else IGNORED for id_, keep in zip(flat(found), kept, strict=True)]


def joined(data: Any, key: str) -> list[int]:
    return [value for index in range(len(data)) for value in data[index][key].tolist()]


# --- training --------------------------------------------------------------------------------------------------------


@unhurried
@given(documents, lengths)
def test_every_training_token_is_an_input_once_but_for_the_last_ones(found: list[list[int]], seq_len: int) -> None:
    data = TrainingWindows(ListedDocuments(found), seq_len, Concatenate())
    inputs, labels = joined(data, "input_ids"), joined(data, "labels")
    assert inputs == flat(found)[: len(inputs)]
    assert labels == flat(found)[1 : len(labels) + 1]
    assert 1 <= len(flat(found)) - len(inputs) <= seq_len


@unhurried
@given(masked(), lengths)
def test_labels_that_are_not_learned_are_ignored(found: tuple[Any, Any], seq_len: int) -> None:
    data = TrainingWindows(ListedDocuments(found[0], learned=found[1]), seq_len, Concatenate())
    labels = joined(data, "labels")
    assert labels == learned_labels(*found)[1 : len(labels) + 1]


@unhurried
@given(documents, lengths)
def test_windows_know_where_documents_begin(found: list[list[int]], seq_len: int) -> None:
    data = TrainingWindows(ListedDocuments(found), seq_len, Shown())
    for index in range(len(data)):
        here = slice(index * seq_len, index * seq_len + seq_len + 1)
        assert data[index]["starts"].tolist() == first_tokens(found)[here]
        assert data[index]["tokens"].tolist() == flat(found)[here]


def test_a_packing_that_needs_no_boundaries_does_not_ask_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ListedDocuments, "ends", lambda self: pytest.fail("asked for"))
    listed = ListedDocuments([[1, 2, 3]], held_out=ListedDocuments([[4, 5]]))
    data = TrainingWindows(listed, 2, Concatenate())
    assert data[0]["input_ids"].tolist() == [1, 2]
    assert data.held_out is not None
    assert data.held_out[0]["labels"].tolist() == [4, 5]


@pytest.mark.parametrize("index", [-1, 2])
def test_a_sequence_that_is_not_there_is_an_error(index: int) -> None:
    with pytest.raises(IndexError, match=f"sequence {index} of 2"):
        TrainingWindows(ListedDocuments([[1, 2, 3, 4]]), 2, Concatenate())[index]


def test_a_window_names_its_tokens() -> None:
    assert TrainingWindows(ListedDocuments([[1, 2, 3, 4]]), 2, Concatenate()).where(1) == "tokens 2 to 4 of a list"


# --- held out --------------------------------------------------------------------------------------------------------


@unhurried
@given(documents, lengths)
def test_every_held_out_token_is_a_label_once_after_the_token_before_it(found: list[list[int]], seq_len: int) -> None:
    data = HeldOutWindows(ListedDocuments(found), seq_len, Concatenate())
    labels, inputs = joined(data, "labels"), joined(data, "input_ids")
    whole = flat(found)
    padding = len(labels) - len(whole)
    assert 0 <= padding < seq_len
    assert labels == [*whole, *[IGNORED] * padding]
    assert inputs[: len(whole)] == [END, *whole[:-1]]
    assert set(inputs[len(whole) + 1 :]) <= {END}


@unhurried
@given(masked(), lengths)
def test_held_out_labels_that_are_not_learned_are_ignored(found: tuple[Any, Any], seq_len: int) -> None:
    data = HeldOutWindows(ListedDocuments(found[0], learned=found[1]), seq_len, Concatenate())
    labels = joined(data, "labels")
    expected = learned_labels(*found)
    assert labels == [*expected, *[IGNORED] * (len(labels) - len(expected))]


@unhurried
@given(documents, lengths)
def test_held_out_windows_know_where_documents_and_the_padding_begin(found: list[list[int]], seq_len: int) -> None:
    data = HeldOutWindows(ListedDocuments(found), seq_len, Shown())
    begins = [*first_tokens(found), True, *[False] * seq_len]
    for index in range(len(data)):
        first = index * seq_len
        assert data[index]["starts"].tolist()[1:] == begins[first : first + seq_len]
        before = begins[first - 1] if first else False  # the end-of-text before the first token is of no document
        assert data[index]["starts"][0] == before


def test_training_data_gives_the_held_out_part_with_its_bytes_per_token() -> None:
    held_out = ListedDocuments([[7, 8]])
    held_out.bytes_per_token = 2.5
    data = TrainingWindows(ListedDocuments([[1, 2, 3]], held_out=held_out), 2, Concatenate())
    assert data.held_out is not None
    assert data.bytes_per_token == data.held_out.bytes_per_token == 2.5
    assert TrainingWindows(ListedDocuments([[1]]), 2, Concatenate()).held_out is None


# --- streams ---------------------------------------------------------------------------------------------------------


class ListedStream:
    """Lanes of documents, epoch after epoch; a position is the number of the document in its lane."""

    held_out = None

    def __init__(self, lanes: list[list[list[int]]], masks: list[list[list[bool]]] | None = None) -> None:
        self._lanes, self._masks = lanes, masks
        self.lanes = len(lanes)

    def read(self, lane: int, position: Mapping[str, Any] | None) -> Iterator[StreamedDocument]:
        number = 0 if position is None else position["number"]
        while True:
            here = number % len(self._lanes[lane])
            learned = None if self._masks is None else np.array([*self._masks[lane][here], True])
            yield StreamedDocument(np.array([*self._lanes[lane][here], END]), learned, {"number": number})
            number += 1


def samples(
    stream: ListedStream, seq_len: int, packing: WindowPacking, count: int, lane: int = 0, at: Any = None
) -> Any:
    """The next samples of a lane, and the position after each."""
    return list(islice(StreamWindows(stream, seq_len, packing).read(lane, at), count))


def test_the_protocols_are_followed() -> None:
    stream = ListedStream([[[1]]])
    assert isinstance(stream, DocumentStream)
    assert isinstance(StreamWindows(stream, 2, Concatenate()), Stream)


@unhurried
@given(documents, lengths, st.integers(1, 20))
def test_a_lane_gives_its_documents_one_after_the_other(found: list[list[int]], seq_len: int, count: int) -> None:
    read = [sample for sample, _ in samples(ListedStream([[[0]], found]), seq_len, Concatenate(), count, lane=1)]
    endless = flat(found) * (count * seq_len + 1)
    for key, shift in (("input_ids", 0), ("labels", 1)):
        assert np.concatenate([sample[key] for sample in read]).tolist() == endless[shift : count * seq_len + shift]


@unhurried
@given(masked(), lengths)
def test_a_lane_knows_where_documents_begin_and_what_is_learned(found: tuple[Any, Any], seq_len: int) -> None:
    stream = ListedStream([found[0]], [found[1]])
    begins = first_tokens(found[0]) * (3 * seq_len + 2)
    kept = [label != IGNORED for label in learned_labels(*found)] * (3 * seq_len + 2)
    for number, (sample, _) in enumerate(samples(stream, seq_len, Shown(), 3)):
        here = slice(number * seq_len, number * seq_len + seq_len + 1)
        assert sample["starts"].tolist() == begins[here]
        assert sample["learned"].tolist() == kept[here]


@unhurried
@given(documents, lengths, st.integers(1, 12))
def test_reading_on_from_any_sample_equals_never_having_stopped(
    found: list[list[int]], seq_len: int, count: int
) -> None:
    stream = ListedStream([found])
    whole = samples(stream, seq_len, Shown(), 2 * count)
    rest = samples(stream, seq_len, Shown(), count, at=whole[count - 1][1])
    for (expected, after), (sample, position) in zip(whole[count:], rest, strict=True):
        assert position == after
        assert {key: value.tolist() for key, value in sample.items()} == {k: v.tolist() for k, v in expected.items()}
