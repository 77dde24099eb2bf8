"""A search by Optuna: each run's values are chosen by the results of those before it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from forge_core.contracts.errors import ForgeError
from forge_plugin_runs.compare.grid import Distribution

Space = Mapping[str, Distribution | list[str]]


class Search:
    """Proposes values and receives results; given the same results, it proposes the same values."""

    def __init__(self, space: Space, seed: int = 0) -> None:
        """Search `space`.

        Raises:
            ForgeError: Optuna is not installed.
        """
        try:
            import optuna
        except ImportError as error:
            raise ForgeError('--search optuna needs Optuna: pip install "forge-plugin-runs[optuna]"') from error
        self._optuna: Any = optuna
        # By default, Optuna writes a line to standard error for each study
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._seed = seed
        self._space = {key: self._distribution(values) for key, values in space.items()}
        self._known: list[tuple[dict[str, Any], float]] = []

    def tell(self, settings: Mapping[str, str], score: float) -> None:
        """Note the result of a run; lower is better, and NaN is the worst."""
        values = {key: self._parsed(key, text) for key, text in settings.items() if key in self._space}
        # A run that lacks a key of the space has no place in it
        if len(values) == len(self._space):
            self._known.append((values, score if math.isfinite(score) else math.inf))

    def ask(self, count: int) -> list[dict[str, str]]:
        """Returns values for `count` further runs, as a job writes them."""
        optuna = self._optuna
        # A new study of all results, so that an interrupted search proposes the same values as an uninterrupted one
        # constant_liar: proposals of one call differ, as each treats the others as poor results
        sampler = optuna.samplers.TPESampler(seed=self._seed + len(self._known), constant_liar=True)
        study = optuna.create_study(sampler=sampler)
        finite = [score for _, score in self._known if math.isfinite(score)]
        # A failed run gets a finite score that is worse than all others
        worst = max(finite, default=0.0) + 1.0
        for values, score in self._known:
            value = score if math.isfinite(score) else worst
            study.add_trial(optuna.trial.create_trial(params=values, distributions=self._space, value=value))
        asked = [study.ask(self._space).params for _ in range(count)]
        return [{key: _written(value) for key, value in values.items()} for values in asked]

    def _distribution(self, values: Distribution | Sequence[str]) -> Any:
        kinds = self._optuna.distributions
        if not isinstance(values, Distribution):
            return kinds.CategoricalDistribution(list(values))
        if values.kind == "int":
            return kinds.IntDistribution(int(values.low), int(values.high))
        return kinds.FloatDistribution(values.low, values.high, log=values.kind == "log")

    def _parsed(self, key: str, text: str) -> Any:
        distribution = self._space[key]
        if not hasattr(distribution, "low"):
            return text
        value = int(text) if isinstance(distribution, self._optuna.distributions.IntDistribution) else float(text)
        # A value at an end of the range may be just outside once it is written with four digits
        return min(max(value, distribution.low), distribution.high)


def _written(value: Any) -> str:
    # As many digits as a person would give: the value in the table is the one that was used
    return f"{value:.4g}" if isinstance(value, float) else str(value)
