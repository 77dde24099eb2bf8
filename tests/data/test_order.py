"""The order of samples: laws that hold for every size, seed and mixture."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from itertools import islice, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.data.order import Permutation, SampleOrder, source_changes, whole_shares
from forge_testing.refusals import lacks

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


def order(mixture, seed=1, state=None, phases=(), limits=None, names=None):
    """An order of sources given as (size, weight)."""
    names = names or [str(number) for number in range(len(mixture))]
    weights = [(0, [weight for _, weight in mixture]), *phases]
    shares = [(first, whole_shares(weights)) for first, weights in weights]
    sizes = [size for size, _ in mixture]
    return SampleOrder(sizes, names, shares, limits or [None] * len(mixture), seed, state)


def take(source, count):
    return list(islice(source, count))


mixtures = st.lists(st.tuples(st.integers(1, 50), st.floats(0, 5)), min_size=1, max_size=4).filter(
    lambda mixture: sum(weight for _, weight in mixture) > 0.1
)


@given(mixtures, st.integers(0, 200), st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_the_order_continues_from_its_state(mixture, passed, more):
    samples = take(order(mixture), passed + more)
    advanced = order(mixture)
    assert advanced.advance(passed) == passed
    state = json.loads(json.dumps(advanced.state()))
    assert take(order(mixture, state=state), more) == samples[passed:]


@given(st.integers(1, 60), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_an_epoch_meets_every_sequence_once_and_the_next_is_shuffled_anew(size, epochs):
    drawn = order([(size, 1.0)])
    seen = [[number for _, number in take(drawn, size)] for _ in range(epochs)]
    assert all(sorted(epoch) == list(range(size)) for epoch in seen)
    if size > 20 and epochs > 1:
        assert seen[0] != seen[1]


def test_another_seed_is_another_order():
    first, second = order([(100, 1.0)], seed=1), order([(100, 1.0)], seed=2)
    assert take(first, 100) != take(second, 100)


def numbers_of(source, samples):
    return [number for drawn_from, number in samples if drawn_from == source]


def test_the_order_within_a_source_depends_on_its_name_and_on_no_other_source():
    alone = take(order([(100, 1.0)], names=["web"]), 50)
    third = take(order([(7, 2.0), (9, 1.0), (100, 1.0)], names=["code", "books", "web"]), 200)
    assert numbers_of(2, third) == numbers_of(0, alone)
    assert numbers_of(0, take(order([(100, 1.0)], names=["math"]), 50)) != numbers_of(0, alone)


def test_a_source_without_a_size_is_numbered_on():
    drawn = take(order([(None, 1.0), (3, 1.0)]), 20)
    assert numbers_of(0, drawn) == list(range(10))
    assert order([(None, 1.0)], state=order([(None, 1.0)]).state()).counts == [0]


class TestPhases:
    MIXTURE = ((50, 2.0), (30, 1.0), (20, 0.0))
    PHASES = ((30, (0.0, 1.0, 1.0)), (61, (5.0, 0.0, 5.0)), (80, (1.0, 1.0, 1.0)))

    def test_shares_change_at_the_sample_where_a_phase_begins(self):
        sources = [source for source, _ in take(order(self.MIXTURE, phases=self.PHASES), 110)]
        parts = sources[:30], sources[30:61], sources[61:80], sources[80:]
        assert [Counter(part) for part in parts] == [
            Counter({0: 20, 1: 10}),
            Counter({1: 16, 2: 15}),
            Counter({0: 10, 2: 9}),
            Counter({0: 10, 1: 10, 2: 10}),
        ]

    def test_a_change_neither_repeats_nor_leaves_out_a_sequence(self):
        drawn = take(order(self.MIXTURE, phases=self.PHASES), 110)
        for source, (size, _) in enumerate(self.MIXTURE):
            alone = order([(size, 1.0)], names=[str(source)])
            numbers = numbers_of(source, drawn)
            assert numbers == [number for _, number in take(alone, len(numbers))]

    @given(st.integers(0, 100))
    @settings(max_examples=40, deadline=None)
    def test_it_continues_inside_any_phase(self, passed):
        whole = take(order(self.MIXTURE, phases=self.PHASES), 110)
        first = order(self.MIXTURE, phases=self.PHASES)
        first.advance(passed)
        assert take(order(self.MIXTURE, phases=self.PHASES, state=first.state()), 110 - passed) == whole[passed:]

    def test_a_phase_with_the_same_proportions_changes_nothing(self):
        same = order(self.MIXTURE, phases=[(31, (4.0, 2.0, 0.0))])
        assert take(same, 90) == take(order(self.MIXTURE), 90)


class TestLimits:
    def test_a_source_at_its_limit_is_left_out_and_the_others_share_its_part(self):
        limited = order([(10, 6.0), (40, 3.0), (40, 1.0)], limits=[15, None, None])
        sources = [source for source, _ in take(limited, 65)]
        assert Counter(sources)[0] == 15
        at_limit = max(number for number, source in enumerate(sources) if source == 0) + 1
        assert abs(at_limit - 25) <= 1
        rest = Counter(sources[at_limit:])
        assert abs(rest[1] - 0.75 * len(sources[at_limit:])) <= 0.5

    def test_passes_beyond_the_limit_do_not_begin(self):
        numbers = numbers_of(0, take(order([(10, 1.0), (40, 1.0)], limits=[20, None]), 100))
        assert sorted(numbers) == sorted([*range(10), *range(10)])

    def test_it_ends_when_every_source_is_used_up(self):
        limited = order([(10, 1.0), (4, 9.0)], limits=[10, 6])
        assert len(list(limited)) == 16
        assert limited.advance(5) == 0
        assert order([(10, 1.0), (4, 9.0)], limits=[10, 6]).advance(20) == 16

    @given(st.integers(0, 60))
    @settings(max_examples=40, deadline=None)
    def test_it_continues_before_and_after_a_source_is_used_up(self, passed):
        mixture, limits = [(10, 6.0), (12, 3.0), (40, 1.0)], [15, 20, None]
        whole = take(order(mixture, limits=limits), 60)
        first = order(mixture, limits=limits)
        first.advance(passed)
        assert take(order(mixture, limits=limits, state=first.state()), 60 - passed) == whole[passed:]


class TestOtherSources:
    """What becomes of a state when the sources are other ones."""

    def state(self):
        before = order([(50, 1.0), (30, 1.0)], names=["web", "code"])
        before.advance(21)
        return before.state()

    def test_added_sources_start_at_0_and_removed_ones_are_dropped(self):
        after = order([(9, 1.0), (50, 1.0)], names=["math", "web"], state=self.state())
        assert after.counts == [0, 11]
        assert after.drawn == 21
        assert set(after.state()["sources"]) == {"math", "web"}
        straight = numbers_of(0, take(order([(50, 1.0)], names=["web"]), 30))
        assert numbers_of(1, take(after, 20)) == straight[11:21]

    def test_the_order_in_which_they_stand_does_not_matter(self):
        after = order([(30, 1.0), (50, 1.0)], names=["code", "web"], state=self.state())
        assert after.counts == [10, 11]

    def test_changes_are_told(self):
        assert source_changes(self.state(), {"web": 50, "code": 30}) == []
        assert source_changes({}, {"web": 50}) == []
        added, removed, shrunk = source_changes(self.state(), {"web": 49, "math": 3})
        assert not lacks(added, "'math'")
        assert not lacks(removed, "'code'", 10)
        assert not lacks(shrunk, "'web'", 50, 49)

    def test_a_source_that_was_never_drawn_from_may_change_its_size(self):
        before = order([(50, 1.0), (30, 0.0)], names=["web", "code"])
        before.advance(5)
        assert source_changes(before.state(), {"web": 50, "code": 99}) == []
