"""Best-fit decreasing: every piece has its place, and the places are those of the textbook."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_plugin_text.packing.fitting import cut, fit, pack, packed_blocks

unhurried = settings(deadline=None, max_examples=50)
documents = st.lists(st.integers(1, 40), max_size=60)
"""Lengths in tokens, end-of-text included."""


def textbook(lengths: list[int], seq_len: int) -> list[int]:
    """One piece after the other, the longest first, into the least room that there is: the room left in the end."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else seq_len) - length)
    return sorted(rooms)


def next_fit(lengths: list[int], seq_len: int) -> int:
    """Sequences that are needed if a piece that does not fit into the present one opens the next."""
    sequences, room = 0, 0
    for length in lengths:
        sequences, room = (sequences, room) if room >= length else (sequences + 1, seq_len)
        room -= length
    return sequences


def fewest(lengths: list[int], seq_len: int) -> int:
    """Sequences that are needed at least, by trying everything."""

    def place(left: list[int], rooms: list[int]) -> int:
        if not left:
            return len(rooms)
        first, rest = left[0], left[1:]
        found = [place(rest, [*rooms, seq_len - first])]
        for room in {room for room in rooms if room >= first}:
            others = rooms.copy()
            others.remove(room)
            found.append(place(rest, [*others, room - first]))
        return min(found)

    return place(sorted(lengths, reverse=True), [])


def rooms_left(lengths: list[int], seq_len: int) -> list[int]:
    sequences = fit(np.array(lengths, dtype=np.int32), seq_len)
    return sorted((seq_len - np.bincount(sequences, weights=lengths)).astype(int).tolist())


@given(documents, st.integers(1, 16))
@unhurried
def test_every_token_that_can_be_predicted_is_a_label_once_and_the_one_before_it_its_input(
    sizes: list[int], seq_len: int
) -> None:
    ends = np.cumsum(sizes, dtype=np.int64)
    (starts, lengths), bounds = pack(ends, seq_len)
    inputs = sorted(token for start, n in zip(starts, lengths, strict=True) for token in range(start, start + n))
    last_tokens = set((ends - 1).tolist())
    assert inputs == [token for token in range(sum(sizes)) if token not in last_tokens]
    assert bounds[0] == 0
    assert bounds[-1] == len(starts)


@given(documents, st.integers(1, 16), st.integers(1, 60))
@unhurried
def test_blocks_are_packed_each_by_itself(sizes: list[int], seq_len: int, block: int) -> None:
    ends = np.cumsum(sizes, dtype=np.int64)
    blocks = list(packed_blocks(ends, seq_len, block))
    for number, ((starts, lengths), bounds) in enumerate(blocks):
        begin = int(ends[number * block - 1]) if number else 0
        alone = pack(ends[number * block : (number + 1) * block] - begin, seq_len)
        assert starts.tolist() == (alone.pieces.starts + begin).tolist()
        assert (lengths.tolist(), bounds.tolist()) == (alone.pieces.lengths.tolist(), alone.bounds.tolist())
    assert sum(int(packing.pieces.lengths.sum()) for packing in blocks) == sum(sizes) - len(sizes)


@given(documents, st.integers(1, 16))
@unhurried
def test_no_piece_crosses_a_document_and_no_sequence_is_overfull_or_empty(sizes: list[int], seq_len: int) -> None:
    ends = np.cumsum(sizes, dtype=np.int64)
    (starts, lengths), bounds = pack(ends, seq_len)
    last = starts + lengths  # the last token that a piece uses, as a label
    assert np.array_equal(np.searchsorted(ends, starts, "right"), np.searchsorted(ends, last, "right"))
    for first, stop in pairwise(bounds.tolist()):
        assert 1 <= lengths[first:stop].sum() <= seq_len


@given(documents, st.integers(1, 16))
@unhurried
def test_only_documents_that_are_too_long_are_cut_and_into_as_few_pieces_as_can_be(
    sizes: list[int], seq_len: int
) -> None:
    pieces = cut(np.cumsum(sizes, dtype=np.int64), seq_len)
    expected = [[seq_len] * ((n - 1) // seq_len) + [(n - 1) % seq_len] * ((n - 1) % seq_len > 0) for n in sizes]
    assert pieces.lengths.tolist() == [length for lengths in expected for length in lengths]


@given(st.lists(st.integers(1, 12), max_size=80), st.integers(12, 30))
@unhurried
def test_pieces_go_where_best_fit_decreasing_puts_them(lengths: list[int], seq_len: int) -> None:
    assert rooms_left(lengths, seq_len) == textbook(lengths, seq_len)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(9, 14))
@unhurried
def test_sequences_are_at_most_11_ninths_of_the_fewest_and_two_thirds_more(lengths: list[int], seq_len: int) -> None:
    """The law of best-fit decreasing (Johnson 1973, Dosa 2007)."""
    assert len(rooms_left(lengths, seq_len)) <= 11 / 9 * fewest(lengths, seq_len) + 6 / 9


@pytest.mark.parametrize(
    ("lengths", "seq_len", "sequences"),
    [
        ([5, 5, 5, 5], 10, 2),
        ([7, 6, 3, 2, 2], 10, 2),
        ([9, 8, 7, 3, 2, 1], 10, 3),
        ([10, 10, 1], 10, 3),
        ([6, 5, 4, 3, 2], 10, 2),
        ([1] * 100, 10, 10),
    ],
)
def test_the_fewest_sequences_are_found_in_small_cases(lengths: list[int], seq_len: int, sequences: int) -> None:
    assert len(rooms_left(lengths, seq_len)) == sequences


@given(st.lists(st.integers(1, 100), max_size=100))
@unhurried
def test_no_more_sequences_are_needed_than_by_next_fit_of_the_same_order(lengths: list[int]) -> None:
    assert len(rooms_left(lengths, 100)) <= next_fit(sorted(lengths, reverse=True), 100)


@pytest.mark.parametrize("mean", [20, 200, 1500])
def test_documents_of_usual_lengths_fill_sequences_better_than_next_fit(mean: int) -> None:
    lengths = np.random.default_rng(0).lognormal(np.log(mean), 1, 20_000).clip(1, 2048).astype(int).tolist()
    needed = len(rooms_left(lengths, 2048))
    assert sum(lengths) / (needed * 2048) > 0.995
    assert needed < next_fit(lengths, 2048)


def test_sequences_stand_in_the_order_of_their_first_piece_and_pieces_in_that_of_the_documents() -> None:
    (starts, lengths), bounds = pack(np.cumsum([3, 9, 4, 8, 2, 2]), 9)
    sequences = [starts[first:stop].tolist() for first, stop in pairwise(bounds)]
    assert sequences == [[0, 16], [3, 24], [12, 26]]
    assert lengths.tolist() == [2, 7, 8, 1, 3, 1]


def test_documents_without_anything_to_predict_give_no_sequence() -> None:
    assert pack(np.cumsum([1, 1, 1]), 4).bounds.tolist() == [0]
    assert pack(np.array([], dtype=np.int64), 4).bounds.tolist() == [0]


@pytest.mark.parametrize("seq_len", [2048, 100_000])
def test_time_does_not_grow_with_the_square_of_the_documents(seq_len: int) -> None:
    """It is half a second of processor time; the square of their number would be hours."""
    sizes = np.random.default_rng(0).lognormal(6, 1.2, 300_000).clip(2, 200_000).astype(np.int64)
    start = time.process_time()
    pack(np.cumsum(sizes), seq_len)
    assert time.process_time() - start < 10
