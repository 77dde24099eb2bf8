"""The sink `statistics`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import deep_iterable, ge, in_, matches_re

from forge_core.contracts.components import when_resumed
from forge_core.contracts.errors import Problem
from forge_plugin_taps.kinds import Sink, SinkComponent, TapsInfo

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_kit.nn.taps import TapPoint

SCALARS = ("norm", "mean", "variance", "kurtosis", "max", "dead", "not_finite", "entropy")
PATTERN = "pattern"
"""Axes of points that are attention, of which alone there is an entropy."""
POWERS = tuple(2.0**power for power in range(-8, 9))
EDGES = (*(-edge for edge in reversed(POWERS)), 0.0, *POWERS)
"""Default edges: powers of two from 1/256 to 256 on both sides, and 0."""

Scalar = Literal["norm", "mean", "variance", "kurtosis", "max", "dead", "not_finite", "entropy"]


@frozen(kw_only=True)
class Statistics(SinkComponent):
    """Writes statistics of the sampled activations: a line for each sampled step in `taps/statistics.jsonl`.

    A line is `{"step": …, "edges": […], "points": {NAME: {…}}}`. Of each point, over all samples of the global batch
    and all its units (features, heads x features, …), the same under every layout:

    - `norm`: mean over samples of the Euclidean norm;
    - `mean`, `variance`, `kurtosis` of values (fourth central moment over squared variance: 3 if they are normal);
    - `max`: the largest absolute value;
    - `dead`: share of units that no sample activates, by more than `dead_below`;
    - `not_finite`: number of values that are infinite or NaN; the others are then of no use, and written as "nan";
    - `entropy`: of attention (points `pattern`) alone: mean over samples and heads of -Σ p log p over keys, in nats. It
      is 0 where a query attends to one key, and log(i + 1) where query i attends to all alike. The share that a sink of
      attention has is no key's;
    - `histogram`: number of values in each bin, from below the first edge to the last edge and above.
    """

    edges: tuple[float, ...] = EDGES
    """Edges of bins, ascending. A value on an edge counts below it. By default 0 and ± powers of two to 256."""
    dead_below: float = field(default=0.0, validator=ge(0))
    """Largest absolute value of a unit that is not active."""
    log: tuple[Scalar, ...] = field(default=("norm",), validator=deep_iterable(in_(SCALARS)))
    """Scalars to put into the lines of metrics, as `taps/POINT/norm`, …; `entropy` of points `pattern`."""
    file: str = field(
        default="taps/statistics.jsonl", validator=matches_re(r".+\.jsonl"), metadata=when_resumed("safe")
    )
    """Where the lines go, relative to the run folder; sinks of this type need different ones."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that edges ascend, and that no other sink writes to the same file."""
        if not self.edges or any(a >= b for a, b in zip(self.edges, self.edges[1:], strict=False)):
            yield Problem("edges", f"must be at least one number, ascending, got {list(self.edges)}")
        stages = job.parallel.values()
        others = [sink for stage in stages for sink in getattr(stage, "sinks", {}).values()]
        if sum(isinstance(sink, Statistics) and sink.file == self.file for sink in others) > 1:
            yield Problem("file", f"{self.file!r} is also used by another sink; give each statistics sink its own")

    def point_problems(self, points: Mapping[str, TapPoint]) -> Iterable[Problem]:
        """Checks that entropy is logged of some point."""
        if "entropy" in self.log and not any(point.side == PATTERN for point in points.values()):
            message = "has entropy, and none of the points that the sink receives is attention"
            yield Problem("log", f"{message}; add layers.*.pattern to parallel.taps.points, or leave it out")

    def build(self, context: BuildContext, taps: TapsInfo) -> Sink:
        """Imports torch only here: a job is checked without it."""
        from forge_plugin_taps.statistics_sink import StatisticsSink

        return StatisticsSink(self, context, taps)
