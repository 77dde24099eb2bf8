"""What samples hold: tokens, labels, and where each document begins."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.data.windows import HeldOutWindows, TrainingWindows
from forge_kit.data.token_file import TokenFile, TokenFileWriter
from forge_plugin_text.packing import Isolate, packing_cache
from forge_plugin_text.packing.sequences import PackedSequences
from forge_testing.documents import END, ListedDocuments

IGNORED = -100
unhurried = settings(deadline=None, max_examples=50)
documents = st.lists(st.lists(st.integers(0, END - 1), min_size=1, max_size=12), min_size=1, max_size=10)


def columns(data: Any, index: int = 0) -> dict[str, list[int]]:
    return {key: value.tolist() for key, value in data[index].items()}


def pairs(data: Any) -> list[tuple[int, int, int]]:
    """(input, label, position) wherever there is a label."""
    rows = [columns(data, index) for index in range(len(data))]
    found = [triple for row in rows for triple in zip(row["input_ids"], row["labels"], row["positions"], strict=True)]
    return [triple for triple in found if triple[1] != IGNORED]


# --- isolate ---------------------------------------------------------------------------------------------------------


def test_isolate_restarts_positions_and_ignores_the_label_that_is_of_the_next_document() -> None:
    data = TrainingWindows(ListedDocuments([[1, 2, 3], [4], [5, 6, 7, 8, 9]]), 5, Isolate())
    assert columns(data, 0) == {
        "input_ids": [1, 2, 3, END, 4],
        "labels": [2, 3, END, IGNORED, END],
        "document_ids": [0, 0, 0, 0, 1],
        "positions": [0, 1, 2, 3, 0],
    }
    assert columns(data, 1) == {
        "input_ids": [END, 5, 6, 7, 8],
        "labels": [IGNORED, 6, 7, 8, 9],
        "document_ids": [0, 1, 1, 1, 1],
        "positions": [0, 0, 1, 2, 3],
    }


def test_isolate_starts_afresh_where_a_window_goes_on_with_a_document() -> None:
    data = TrainingWindows(ListedDocuments([list(range(9))]), 3, Isolate())
    for index in range(3):
        assert columns(data, index)["positions"] == [0, 1, 2]
        assert columns(data, index)["labels"] == ([1, 2, 3], [4, 5, 6], [7, 8, END])[index]


@given(documents, st.integers(1, 9))
@unhurried
def test_isolate_learns_every_token_but_the_first_of_each_document(found: list[list[int]], seq_len: int) -> None:
    whole = [[*ids, END] for ids in found]
    data = HeldOutWindows(ListedDocuments(found), seq_len, Isolate())
    expected = [pair for ids in whole for pair in pairwise(ids)]
    assert [(input_, label) for input_, label, _ in pairs(data)] == expected


@given(documents, st.integers(1, 9))
@unhurried
def test_isolate_numbers_documents_and_positions_from_the_windows_first(found: list[list[int]], seq_len: int) -> None:
    data = TrainingWindows(ListedDocuments(found), seq_len, Isolate())
    for index in range(len(data)):
        ids, positions = (columns(data, index)[key] for key in ("document_ids", "positions"))
        assert ids[0] == positions[0] == 0
        for (id_, position), after in pairwise(zip(ids, positions, strict=True)):
            assert after in ((id_, position + 1), (id_ + 1, 0))


def test_isolate_keeps_what_is_not_learned_ignored() -> None:
    listed = ListedDocuments([[1, 2], [3, 4]], learned=[[True, False], [True, True]])
    assert columns(TrainingWindows(listed, 5, Isolate()))["labels"] == [IGNORED, END, IGNORED, 4, END]


# --- best fit --------------------------------------------------------------------------------------------------------


def test_best_fit_fills_a_sequence_with_whole_documents_and_the_rest_with_padding() -> None:
    data = PackedSequences(ListedDocuments([[1, 2], [3, 4, 5, 6], [7]]), 4)
    assert len(data) == 2
    assert columns(data, 0) == {
        "input_ids": [1, 2, 7, END],
        "labels": [2, END, END, IGNORED],
        "document_ids": [0, 0, 1, 2],
        "positions": [0, 1, 0, 0],
    }
    assert columns(data, 1) == {
        "input_ids": [3, 4, 5, 6],
        "labels": [4, 5, 6, END],
        "document_ids": [0, 0, 0, 0],
        "positions": [0, 1, 2, 3],
    }


def test_padding_is_one_document_of_its_own() -> None:
    row = columns(PackedSequences(ListedDocuments([[1]]), 5))
    assert row["document_ids"] == [0, 1, 1, 1, 1]
    assert row["positions"] == [0, 0, 1, 2, 3]
    assert row["labels"] == [END, *[IGNORED] * 4]


def test_a_document_that_is_too_long_is_cut_without_losing_a_label() -> None:
    data = PackedSequences(ListedDocuments([list(range(10))]), 4)
    assert [columns(data, index)["input_ids"][:4] for index in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [triple[:2] for triple in pairs(data)] == [(n, n + 1) for n in range(9)] + [(9, END)]
    assert columns(data, 2)["input_ids"] == [8, 9, END, END]


@given(documents, st.integers(1, 9))
@unhurried
def test_best_fit_learns_every_token_but_the_first_of_each_document(found: list[list[int]], seq_len: int) -> None:
    data = PackedSequences(ListedDocuments(found), seq_len)
    expected = [
        (a, b, place % seq_len) for ids in ([*ids, END] for ids in found) for place, (a, b) in enumerate(pairwise(ids))
    ]
    assert sorted(pairs(data)) == sorted(expected)


def test_best_fit_keeps_what_is_not_learned_ignored() -> None:
    listed = ListedDocuments([[1, 2], [3, 4]], learned=[[True, False], [True, True]])
    assert columns(PackedSequences(listed, 4))["labels"] == [IGNORED, END, 4, END]


def test_best_fit_packs_the_held_out_part_too_and_tells_how_full_sequences_are() -> None:
    data = PackedSequences(ListedDocuments([[1, 2], [3]], held_out=ListedDocuments([[7, 8]])), 4)
    assert data.held_out is not None
    assert columns(data.held_out)["input_ids"] == [7, 8, END, END]
    assert data.bytes_per_token == data.held_out.bytes_per_token == 1.0
    told = "2 documents in 1 sequences, 75.00% filled; held out: 1 documents in 1 sequences, 50.00% filled"
    assert data.describe() == told


@pytest.mark.parametrize("index", [-1, 1])
def test_a_sequence_that_is_not_there_is_an_error(index: int) -> None:
    with pytest.raises(IndexError, match=f"sequence {index} of 1"):
        PackedSequences(ListedDocuments([[1]]), 5)[index]


def test_a_sequence_names_its_pieces() -> None:
    data = PackedSequences(ListedDocuments([[1]] * 6), 6)
    places = "; ".join(f"tokens {2 * n} to {2 * n + 1} of a list" for n in range(4))
    assert data.where(0) == f"{places}; 2 more pieces"


# --- the cache -------------------------------------------------------------------------------------------------------


def test_the_packing_is_made_once_for_the_same_lengths(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = PackedSequences(ListedDocuments([[1, 2], [3]]), 4)
    with monkeypatch.context() as patched:
        patched.setattr(packing_cache, "packed_blocks", lambda *_: pytest.fail("packed again"))
        assert columns(PackedSequences(ListedDocuments([[4, 5], [6]]), 4))["document_ids"] == [0, 0, 1, 2]
        for others in ([[1, 2], [3, 4]], [[1, 2]]):
            with pytest.raises(pytest.fail.Exception, match="packed again"):
                PackedSequences(ListedDocuments(others), 4)
        with pytest.raises(pytest.fail.Exception, match="packed again"):
            PackedSequences(ListedDocuments([[1, 2], [3]]), 5)
    assert len(list((cache / "packing").iterdir())) == 1
    assert isinstance(first._packing.pieces.starts, np.memmap)


def test_a_damaged_packing_is_made_again(cache: Path) -> None:
    listed = ListedDocuments([[1, 2], [3]])
    expected = columns(PackedSequences(listed, 4))
    (folder,) = (cache / "packing").iterdir()
    (folder / "starts").write_bytes(b"")
    assert columns(PackedSequences(listed, 4)) == expected


def test_a_corpus_of_several_blocks_is_packed_whole(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ListedDocuments([[number] * (1 + number % 5) for number in range(1, 12)])
    whole = PackedSequences(listed, 8)
    monkeypatch.setattr("forge_plugin_text.packing.packing_cache.BLOCK", 4)
    monkeypatch.setattr("forge_plugin_text.packing.packing_cache.GROUP", "packing in blocks")
    blocks = PackedSequences(listed, 8)
    labels = [sorted(int(n) for row in data for n in row["labels"] if n >= 0) for data in (whole, blocks)]
    assert labels[0] == labels[1]
    assert len(blocks) > len(whole)


def test_a_pickled_copy_carries_neither_tokens_nor_packing(tmp_path: Path) -> None:
    for name in ("train", "held_out"):
        with TokenFileWriter(tmp_path / name, 100, END) as writer:
            for number in range(2000):
                writer.add(str(number), [number % END] * (1 + number % 7))
    data = PackedSequences(TokenFile(tmp_path / "train", TokenFile(tmp_path / "held_out")), 64)
    pickled = pickle.dumps(data)
    copy = pickle.loads(pickled)
    assert len(pickled) < 2500
    assert columns(copy, 17) == columns(data, 17)
    assert columns(copy.held_out, 3) == columns(data.held_out, 3)
