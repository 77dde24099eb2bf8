"""Turns: shares that hold at any time, for every mixture.

The proof that they do. With k sources, m = 2k - 2 and turns counted from 0, turn c of a source with share s may come
before turn n once s n - c >= 1/m, and is due before s n - c > 1 - 1/m. `Turns` takes, of the sources that may come, the
one that is due first. After any n turns each source has then had its share of n to within 1 - 1/m, because

1. one may always come: before turn n the differences s n - c add up to 1; if each were less than 1/m, they would add up
   to less than k/m <= 1;
2. none is late: taking the source due first meets all due times if they can be met at all, and they can if no N turns
   in a row, from turn a to turn b = a + N - 1, hold more than N of the spans between "may come" and "due" (Hall). Fewer
   than s N + 2/m of one source lie within. If at most k - 1 sources have some, they are fewer than
   N + (k - 1) 2/m = N + 1. If all k have, then of each source these are the whole numbers c with
   s(a - 1) - 1/m < c < s b - 1 + 1/m. The first ones add up to more than a - 1 - k/m >= a - 2, the last ones plus 1 to
   less than b + k/m <= b + 1, so there are at most b - (a - 1) = N.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.data.order import Turns, whole_shares

weights = st.one_of(st.floats(0, 5), st.floats(1e-4, 1.0).map(lambda x: x**4), st.sampled_from([0.0, 1.0, 100.0]))
mixtures = st.lists(weights, min_size=1, max_size=12).filter(any)
temperatures = st.one_of(st.just(1.0), st.floats(0.2, 10))


def counts_over_time(shares, turns):
    """How many turns each source has had after 0, 1, 2, … turns."""
    sequence = Turns(shares)
    rows = [tuple(sequence.taken)]
    for _ in range(turns):
        sequence.take()
        rows.append(tuple(sequence.taken))
    return rows


def bound(shares):
    """Tijdeman's, times 2k - 2."""
    k = sum(share > 0 for share in shares)
    return (2 * k - 2, 2 * k - 3) if k > 1 else (1, 0)


@given(mixtures, temperatures, st.integers(1, 400))
@settings(max_examples=200, deadline=None)
def test_every_source_has_its_share_at_any_time_to_within_the_bound(mixture, temperature, turns):
    shares = whole_shares(mixture, temperature)
    total, (scale, most) = sum(shares), bound(shares)
    for turn, counts in enumerate(counts_over_time(shares, turns)):
        assert sum(counts) == turn
        for share, count in zip(shares, counts, strict=True):
            assert abs(count * total - share * turn) * scale <= most * total  # |count - share n| <= 1 - 1/(2k - 2)


@given(mixtures, st.integers(1, 300), st.data())
@settings(max_examples=60, deadline=None)
def test_every_window_has_its_shares_to_within_two(mixture, turns, data):
    shares = whole_shares(mixture)
    rows = counts_over_time(shares, turns)
    start = data.draw(st.integers(0, turns))
    stop = data.draw(st.integers(start, turns))
    for share, before, after in zip(shares, rows[start], rows[stop], strict=True):
        assert abs((after - before) - share / sum(shares) * (stop - start)) < 2


def test_the_bound_holds_far_out_and_for_shares_far_apart():
    shares = whole_shares([1e6, 1.0, 1.0, 0.1, 1e-3, 0.0])
    total = sum(shares)
    periods = 1000  # after total turns, about 1e9, each has had exactly its share
    sequence = Turns(shares, [periods * share for share in shares])
    for turn in range(periods * total + 1, periods * total + 20_001):
        sequence.take()
        assert all(abs(c * total - s * turn) * 8 <= 7 * total for c, s in zip(sequence.taken, shares, strict=True))


@given(mixtures, st.integers(0, 200), st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_turns_continue_from_their_counts(mixture, passed, more):
    straight = Turns(whole_shares(mixture))
    for _ in range(passed):
        straight.take()
    continued = Turns(straight.shares, straight.taken)
    assert [continued.take() for _ in range(more)] == [straight.take() for _ in range(more)]


def test_equal_sources_go_round():
    turns = Turns([1, 1, 1])
    taken = [turns.take() for _ in range(9)]
    assert taken == taken[:3] * 3
    assert set(taken) == {0, 1, 2}


def test_shares_are_the_smallest_whole_numbers_and_decimals_are_exact():
    assert whole_shares([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert whole_shares([100.0, 50.0]) == [2, 1]
    assert whole_shares([1e-300, 0.0]) == [1, 0]


@given(mixtures, st.floats(0.05, 1e6))
@settings(max_examples=100, deadline=None)
def test_a_weight_of_0_is_never_drawn_at_any_temperature_and_no_other_is_lost(mixture, temperature):
    shares = whole_shares(mixture, temperature)
    assert [share > 0 for share in shares] == [weight > 0 for weight in mixture]


@pytest.mark.parametrize("temperature", [0.5, 2.0, 3.3])
def test_a_temperature_is_an_exponent(temperature):
    mixture = [8.0, 4.0, 1.0]
    shares = whole_shares(mixture, temperature)
    for (a, b), (share_a, share_b) in zip(pairwise(mixture), pairwise(shares), strict=True):
        assert share_a / share_b == pytest.approx((a / b) ** (1 / temperature), rel=1e-10)


def test_an_infinite_temperature_makes_shares_equal():
    assert whole_shares([9.0, 1.0, 0.0], float("inf")) == [1, 1, 0]
