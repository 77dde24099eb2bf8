"""Arithmetic of sets of time intervals, each a list of (start, end) in order, apart from each other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Intervals = list[tuple[float, float]]


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Returns the time that is in any of the intervals, which may overlap and come in any order."""
    merged: Intervals = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def length(intervals: Intervals) -> float:
    """Returns the total time of a set."""
    return sum(end - start for start, end in intervals)


def contains(intervals: Intervals, time: float) -> bool:
    """Returns whether a time is in a set."""
    place = bisect_right(intervals, time, key=lambda interval: interval[0]) - 1
    return place >= 0 and time < intervals[place][1]


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """Returns the time that is in both sets."""
    common: Intervals = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(first: Intervals, second: Intervals) -> Intervals:
    """Returns the time that is in the first set and not in the second."""
    left: Intervals = []
    j = 0
    for whole_start, end in first:
        start = whole_start
        while j < len(second) and second[j][1] <= start:
            j += 1
        # `j` stays at the first interval that may overlap: it may reach into the next one of `first`, too
        k = j
        while k < len(second) and second[k][0] < end:
            if second[k][0] > start:
                left.append((start, second[k][0]))
            start = max(start, second[k][1])
            k += 1
        if start < end:
            left.append((start, end))
    return left
