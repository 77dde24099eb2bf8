"""Keys that are tuned at every size and budget: the best runs, and how their values follow from the scale.

Around its best run, the loss is a parabola in the logarithm of a key, whose minimum is the optimum (as Li et al. 2025,
arXiv:2503.04715, and Bi et al. 2024, arXiv:2401.02954, have it for rate and batch); a power of parameters and tokens is
fitted to the optima of all sizes and budgets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from attrs import field, frozen

from forge_plugin_ladder.points import Point
from forge_plugin_ladder.values import Values

LEAST = 5
"""Optima of a power law, two more than it has values at most."""
TOGETHER = 0.98
"""Correlation of log N and log D beyond which the effects of the two cannot be told apart."""
Setting = tuple[tuple[str, float], ...]


@frozen(kw_only=True)
class Optimum:
    """The best value of a key at one size and budget."""

    parameters: float
    tokens: float
    value: float


@frozen(kw_only=True)
class OptimumLaw:
    """value = at_reference (N / parameters)^by_parameters (D / tokens)^by_tokens, with resamples of the optima."""

    parameters: float
    """Of the reference, the geometric mean of the optima; N as the rule `power` has it, without embedding and head."""
    tokens: float
    at_reference: float
    by_parameters: float
    by_tokens: float
    resamples: Values = field(eq=False)
    """(R, 3): log at_reference, by_parameters, by_tokens."""
    widened: float
    """Factor on deviations from the fit (see `intervals`)."""
    optima: Sequence[Optimum]
    spread: float
    """Mean deviation of the optima, relative."""

    def at(self, parameters: float, tokens: float) -> float:
        """Returns the best value at a scale."""
        return math.exp(self._powers(parameters, tokens) @ self._values)

    def interval(self, parameters: float, tokens: float, level: float) -> tuple[float, float]:
        """Returns the interval of the best value at a scale."""
        deviations = (self.resamples - self._values) @ self._powers(parameters, tokens) * self.widened
        low, high = np.quantile(deviations, [(1 - level) / 2, (1 + level) / 2])
        best = self.at(parameters, tokens)
        return best * math.exp(low), best * math.exp(high)

    def exponent_interval(self, name: str, level: float) -> tuple[float, float]:
        """Returns the interval of `by_parameters` or `by_tokens`."""
        column = 1 if name == "by_parameters" else 2
        deviations = (self.resamples[:, column] - self._values[column]) * self.widened
        low, high = np.quantile(deviations, [(1 - level) / 2, (1 + level) / 2])
        return self._values[column] + float(low), self._values[column] + float(high)

    @property
    def _values(self) -> Values:
        return np.array([math.log(self.at_reference), self.by_parameters, self.by_tokens])

    def _powers(self, parameters: float, tokens: float) -> Values:
        return np.array([1.0, math.log(parameters / self.parameters), math.log(tokens / self.tokens)])


@frozen(kw_only=True)
class Tuned:
    """What was found for one key."""

    law: OptimumLaw | None
    """None: there are too few optima."""
    warnings: Sequence[str]


def best_points(points: Sequence[Point]) -> list[Point]:
    """Returns the points of the law: every seed of the best setting of each size and budget.

    Where no run of a size and budget has a loss, all of its points remain, with their reasons.
    """
    best: list[Point] = []
    for cell in _cells(points).values():
        means = _means(cell)
        # Without a loss there is nothing to choose by
        kept = min(means, key=means.__getitem__) if means else None
        best += [point for point in cell if kept is None or setting_of(point) == kept]
    return best


def setting_of(point: Point) -> Setting:
    """Returns what identifies the setting of a point at its size and budget."""
    # A key may follow from another by a rule: factors are a grid then, and values are not
    return tuple(sorted((point.factors or point.tuned).items()))


def tune(points: Sequence[Point], count: int, seed: int = 0) -> dict[str, Tuned]:
    """Returns for each tuned key how its best value follows from parameters and tokens.

    Args:
        points: all points of a ladder.
        count: resamples of the optima.
        seed: of the resamples.
    """
    found = {}
    for key in dict.fromkeys(key for point in points for key in point.tuned):
        optima, warnings = list[Optimum](), list[str]()
        for cell in _cells(points).values():
            optimum = _optimum([point for point in cell if key in point.tuned], key)
            if isinstance(optimum, str):
                warnings.append(optimum)
            elif optimum is not None:
                optima.append(optimum)
        law = _fit(optima, count, seed) if len(optima) >= LEAST else None
        if law is None:
            warnings.append(f"{key}: {len(optima)} best values, and a power of the scale needs {LEAST}")
        found[key] = Tuned(law=law, warnings=warnings)
    return found


def _cells(points: Sequence[Point]) -> dict[tuple[float, float, str], list[Point]]:
    """The points by size and budget."""
    cells: dict[tuple[float, float, str], list[Point]] = {}
    for point in points:
        # By the label: batches round the tokens of one budget to other numbers
        budget = point.budget or f"{point.tokens:.3g}"
        cells.setdefault((point.parameters, point.parameters_total, budget), []).append(point)
    return cells


def _means(cell: Sequence[Point]) -> dict[Setting, float]:
    """The mean loss over the seeds of each setting, of settings none of whose seeds failed."""
    # A rate of which one seed diverged is not to be recommended
    losses: dict[Setting, list[float]] = {}
    for point in cell:
        losses.setdefault(setting_of(point), []).append(point.loss if point.usable else math.inf)
    means = {setting: float(np.mean(each)) for setting, each in losses.items()}
    return {setting: mean for setting, mean in means.items() if math.isfinite(mean)}


def _optimum(cell: Sequence[Point], key: str) -> Optimum | str | None:
    """The minimum over a key, others as in the best run; why there is none, or None without any loss."""
    means = _means(cell)
    if not means:
        return None
    best = min(means, key=means.__getitem__)
    others = {name: number for name, number in best if name != key}
    values = {setting_of(point): point.tuned[key] for point in cell}
    # Others at their best: over all, an optimum would be of whatever the grid happens to have
    line = sorted(
        (math.log(values[setting]), mean)
        for setting, mean in means.items()
        if {name: number for name, number in setting if name != key} == others
    )
    place = [x for x, _ in line].index(math.log(values[best]))
    point = next(point for point in cell if setting_of(point) == best)
    if not 0 < place < len(line) - 1:
        return (
            f"{key}: with {point.parameters:.3g} parameters and {point.tokens:.3g} tokens the best value is "
            f"{values[best]:.4g}, the {'largest' if place else 'least'} that was tried; it is left out"
        )
    (x0, y0), (x1, y1), (x2, y2) = line[place - 1 : place + 2]
    # The parabola through three points, in Newton's form
    first, second = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    bend = (second - first) / (x2 - x0)
    # Three equal losses have no minimum between them
    x = x1 if bend <= 0 else (x0 + x1) / 2 - first / (2 * bend)
    return Optimum(parameters=point.parameters, tokens=point.tokens, value=math.exp(x))


def _fit(optima: Sequence[Optimum], count: int, seed: int) -> OptimumLaw:
    """Least squares of log values, and of draws of the optima."""
    n, d = (np.log([getattr(each, name) for each in optima]) for name in ("parameters", "tokens"))
    y = np.log([each.value for each in optima])
    used = [0, *_told_apart(n, d)]
    powers = np.stack([np.ones_like(n), n - n.mean(), d - d.mean()], axis=1)
    values = _solve(powers, y, used)
    # The same draws in every command, so that a prediction has the intervals of the fit
    generator, resamples = np.random.default_rng(seed), []
    for _ in range(count):
        rows = generator.integers(0, len(y), len(y))
        resamples.append(_solve(powers[rows], y[rows], used))
    return OptimumLaw(
        parameters=math.exp(n.mean()),
        tokens=math.exp(d.mean()),
        at_reference=math.exp(values[0]),
        by_parameters=float(values[1]),
        by_tokens=float(values[2]),
        resamples=np.stack(resamples),
        widened=math.sqrt(len(y) / (len(y) - len(used))),
        optima=optima,
        spread=float(np.abs(np.exp(y - powers @ values) - 1).mean()),
    )


def _told_apart(n: Values, d: Values) -> Iterator[int]:
    """Columns of log N and log D of which the optima say something."""
    has_sizes, has_tokens = np.ptp(n) > 1e-6, np.ptp(d) > 1e-6
    if has_sizes:
        yield 1
    # With tokens in proportion to parameters, one exponent has the effect of both
    if has_tokens and not (has_sizes and abs(np.corrcoef(n, d)[0, 1]) > TOGETHER):
        yield 2


def _solve(powers: Values, y: Values, used: Sequence[int]) -> Values:
    """(3,): least squares over some columns, 0 for the others."""
    values = np.zeros(3)
    # A draw may have a single size: the smallest of all solutions leaves its exponent near 0
    values[used] = np.linalg.lstsq(powers[:, used], y, rcond=None)[0]
    return values


def laws_of(tuned: Mapping[str, Tuned]) -> dict[str, OptimumLaw]:
    """Returns the laws of the keys that have one."""
    return {key: each.law for key, each in tuned.items() if each.law is not None}
