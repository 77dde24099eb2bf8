"""Sets of intervals, against sets of whole numbers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from forge_plugin_profile.intervals import contains, difference, intersection, length, union

ANY = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def points(intervals):
    return {point for start, end in intervals for point in range(int(start), int(end))}


@given(ANY, ANY)
def test_they_are_sets_of_points(first, second):
    a, b = union(first), union(second)
    assert points(a) == points(first)
    assert length(a) == len(points(first))
    assert {point for point in range(-1, 32) if contains(a, point)} == points(a)
    assert points(intersection(a, b)) == points(a) & points(b)
    assert points(difference(a, b)) == points(a) - points(b)
    for result in (a, intersection(a, b), difference(a, b)):
        assert all(start < end for start, end in result)
        assert all(before[1] <= after[0] for before, after in pairwise(result))
