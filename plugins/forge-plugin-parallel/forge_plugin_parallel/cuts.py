"""Where to cut a model into pipeline stages. Pure arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from attrs import frozen


@frozen
class Section:
    """What one pipeline stage has of a model."""

    layers: tuple[str, ...]
    """Names of its layers."""
    first: bool = False
    """Whether it begins with `embed`."""
    last: bool = False
    """Whether it ends with `finish` and the head."""


def sections(layers: Sequence[str], counts: Sequence[int]) -> list[Section]:
    """The stages of a model, with so many layers each."""
    ends = list(accumulate(counts))
    starts = [0, *ends[:-1]]
    last = len(counts) - 1
    return [
        Section(tuple(layers[start:end]), first=number == 0, last=number == last)
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def ranks_of(stages: int, ranks: int, v_shaped: bool) -> list[int]:
    """The rank of each stage: round and round, or there and back."""
    if v_shaped:
        return [*range(ranks), *reversed(range(ranks))]
    return [stage % ranks for stage in range(stages)]


def balance(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[int]:
    """How many layers to give each stage, at least one, so that the costliest stage costs least; of all such ways, one
    with the least sum of squares.

    Args:
        costs: of each layer.
        first, last: what the first and the last stage cost besides.
    """
    sums = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, end: int) -> float:
        ends = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
        return sums[end] - sums[start] + ends

    @cache
    def best(stage: int, start: int, limit: float | None) -> tuple[float, tuple[int, ...]]:
        """(objective, ends of the stages) for the layers from `start` on. Without a limit the objective is the
        costliest stage; with one, the sum of squares of stages within it."""
        if stage == stages - 1:
            value = cost(stage, start, len(costs))
            return _objective([value], limit), (len(costs),)
        found = []
        for end in range(start + 1, len(costs) - (stages - 1 - stage) + 1):
            rest, ends = best(stage + 1, end, limit)
            own = _objective([cost(stage, start, end)], limit)
            found.append((max(own, rest) if limit is None else own + rest, (end, *ends)))
        return min(found)

    costliest, _ = best(0, 0, None)
    _, ends = best(0, 0, costliest)
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _objective(costs: Sequence[float], limit: float | None) -> float:
    if limit is None:
        return max(costs)
    return sum(cost**2 if cost <= limit * (1 + 1e-9) else float("inf") for cost in costs)
