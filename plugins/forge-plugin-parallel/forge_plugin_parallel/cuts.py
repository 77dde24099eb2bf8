"""Where to cut a model into pipeline stages. Pure arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from attrs import frozen


@frozen
class Section:
    """The part of a model that one pipeline stage computes."""

    layers: tuple[str, ...]
    """Names of its layers."""
    first: bool = False
    """Whether it begins with `embed`."""
    last: bool = False
    """Whether it ends with `finish` and the head."""


def sections(layers: Sequence[str], counts: Sequence[int]) -> list[Section]:
    """Cut layers into consecutive sections.

    Args:
        layers: names of all layers, in order.
        counts: number of layers of each section.
    """
    ends = list(accumulate(counts))
    starts = [0, *ends[:-1]]
    last = len(counts) - 1
    return [
        Section(tuple(layers[start:end]), first=number == 0, last=number == last)
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def ranks_of(stages: int, ranks: int, v_shaped: bool) -> list[int]:
    """Returns the rank of each stage: round-robin, or forward and back (`v_shaped`, two stages per rank)."""
    if v_shaped:
        return [*range(ranks), *reversed(range(ranks))]
    return [stage % ranks for stage in range(stages)]


def balance(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[int]:
    """Balance layers over stages: minimise the cost of the costliest stage, then the sum of squares.

    Args:
        costs: cost of each layer, in any unit.
        stages: number of stages; at most the number of layers.
        first: further cost of the first stage, in the same unit.
        last: further cost of the last stage.

    Returns:
        The number of layers of each stage, at least one.
    """
    sums = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, end: int) -> float:
        ends = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
        return sums[end] - sums[start] + ends

    @cache
    def best(stage: int, start: int, limit: float | None) -> tuple[float, tuple[int, ...]]:
        """Returns (objective, ends of the stages) for the layers from `start` on.

        The objective is the costliest stage without a limit, and the sum of squares of stages within it with one.
        """
        if stage == stages - 1:
            value = cost(stage, start, len(costs))
            return _objective([value], limit), (len(costs),)
        candidates = []
        # At least one layer is left for each later stage
        for end in range(start + 1, len(costs) - (stages - 1 - stage) + 1):
            rest, ends = best(stage + 1, end, limit)
            own = _objective([cost(stage, start, end)], limit)
            candidates.append((max(own, rest) if limit is None else own + rest, (end, *ends)))
        return min(candidates)

    # Two passes: the costliest stage sets the speed, but many cuts share its cost; the second pass takes the most even.
    costliest, _ = best(0, 0, None)
    _, ends = best(0, 0, costliest)
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _objective(costs: Sequence[float], limit: float | None) -> float:
    if limit is None:
        return max(costs)
    # A tolerance, so that rounding excludes no stage that is as costly as the limit.
    return sum(cost**2 if cost <= limit * (1 + 1e-9) else float("inf") for cost in costs)
