"""The order of samples: laws that hold for every size, seed and mixture."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.data.order import Permutation, SampleOrder

sizes = st.integers(1, 3000)


@given(sizes, st.text(max_size=5))
@settings(max_examples=50, deadline=None)
def test_a_permutation_meets_every_number_once(size, key):
    permutation = Permutation(size, key)
    assert sorted(permutation[i] for i in range(size)) == list(range(size))


def test_permutations_of_other_keys_differ_and_look_shuffled():
    first, second = ([Permutation(1000, key)[i] for i in range(1000)] for key in "ab")
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 20
    assert sum(abs(a - b) == 1 for a, b in pairwise(first)) < 20
    assert 200 < sum(i for i, x in enumerate(first) if x < 500) / 500 < 800


def test_a_permutation_of_a_trillion_takes_no_memory():
    tracemalloc.start()
    permutation = Permutation(10**12, "seed")
    drawn = [permutation[i] for i in range(10**12 - 1000, 10**12)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(drawn)) == 1000
    assert peak < 200_000


mixtures = st.lists(st.tuples(st.integers(1, 50), st.floats(0, 5)), min_size=1, max_size=4).filter(
    lambda mixture: sum(weight for _, weight in mixture) > 0.1
)


def order(mixture, seed=1, counts=()):
    return SampleOrder([size for size, _ in mixture], [weight for _, weight in mixture], seed, counts)


@given(mixtures, st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_every_source_has_its_share_at_any_time(mixture, samples):
    total = sum(weight for _, weight in mixture)
    counts = Counter(next(source).source for source in [order(mixture)] * samples)
    for number, (_, weight) in enumerate(mixture):
        assert abs(counts[number] - samples * weight / total) < len(mixture)
        if weight == 0:
            assert counts[number] == 0


@given(mixtures, st.integers(0, 200), st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_the_order_continues_from_its_counts(mixture, passed, more):
    straight = order(mixture)
    samples = [next(straight) for _ in range(passed + more)]
    advanced = order(mixture)
    advanced.advance(passed)
    continued = order(mixture, counts=advanced.counts)
    assert [next(continued) for _ in range(more)] == samples[passed:]


@given(st.integers(1, 60), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_an_epoch_meets_every_sequence_once_and_the_next_is_shuffled_anew(size, epochs):
    drawn = order([(size, 1.0)])
    seen = [[next(drawn).number for _ in range(size)] for _ in range(epochs)]
    assert all(sorted(epoch) == list(range(size)) for epoch in seen)
    if size > 20 and epochs > 1:
        assert seen[0] != seen[1]


def test_another_seed_is_another_order():
    first, second = order([(100, 1.0)], seed=1), order([(100, 1.0)], seed=2)
    assert [next(first) for _ in range(100)] != [next(second) for _ in range(100)]
