"""The numbers of a run that its curves show."""

from __future__ import annotations

import json
import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from attrs import define, field

Numbers = TypeVar("Numbers", float, np.ndarray)


@define
class Series:
    """Values by step, in the order of arrival."""

    steps: array[int] = field(factory=lambda: array("q"))
    values: array[float] = field(factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Append a value."""
        self.steps.append(step)
        self.values.append(value)

    def __len__(self) -> int:
        return len(self.steps)


@define
class Average:
    """Exponential moving average over about `horizon` values, without bias towards its start at zero.

    The bias correction is the same as for Adam's moments (Kingma and Ba 2015, section 3). Values that are not finite
    are ignored.
    """

    horizon: int
    _sum: Any = 0.0
    _weight: float = 0.0

    def add(self, value: Numbers) -> Numbers:
        """Add a value, and return the average."""
        if np.isfinite(value).all():
            share = 1 / self.horizon
            self._sum += share * (value - self._sum)
            # Reaches 1 as the zero at the start loses its share; the average is divided by it
            self._weight += share * (1 - self._weight)
        return self.value  # type: ignore[no-any-return]

    @property
    def value(self) -> Any:
        """The average; NaN without values."""
        return self._sum / self._weight if self._weight else math.nan


class History:
    """Series for a picture, from all lines of metrics so far."""

    def __init__(self, horizon: int) -> None:
        """Start empty; `horizon` is the number of steps that the smooth series average over."""
        self.horizon = horizon
        self.loss, self.grad_norm, self.lr = Series(), Series(), Series()
        self.smooth_loss, self.smooth_grad_norm = Series(), Series()
        self.evaluations: dict[str, Series] = defaultdict(Series)
        self.counts: dict[str, dict[str, Average]] = defaultdict(dict)
        """Counts of layers, by name and layer."""
        self.step = 0
        self.tokens = 0
        self._lines = 0
        self._average_loss, self._average_grad_norm = Average(horizon), Average(horizon)

    def __len__(self) -> int:
        """Number of lines."""
        return self._lines

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a line. Numbers that are not finite may be strings, as in a file of JSON lines."""
        self._lines += 1
        self.step = record["step"]
        if "loss" in record:
            self._add_training(record["step"], {name: float(record[name]) for name in ("loss", "grad_norm", "lr")})
            self.tokens = record.get("tokens", 0)
            for name, rows in record.get("counts", {}).items():
                for row, values in rows.items():
                    self.counts[name].setdefault(row, Average(self.horizon)).add(np.array(values, float))
            return
        for name, value in record.items():
            if name.startswith("eval/"):
                self.evaluations[name.removeprefix("eval/")].add(record["step"], float(value))

    def _add_training(self, step: int, values: Mapping[str, float]) -> None:
        self.loss.add(step, values["loss"])
        self.smooth_loss.add(step, self._average_loss.add(values["loss"]))
        self.grad_norm.add(step, values["grad_norm"])
        self.smooth_grad_norm.add(step, self._average_grad_norm.add(values["grad_norm"]))
        self.lr.add(step, values["lr"])


def read_lines(path: Path, last_step: int) -> Iterator[dict[str, Any]]:
    """Yields the lines of metrics up to `last_step`, without one that was truncated when a run was killed."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:  # a line that was cut off
                continue
            if record["step"] <= last_step:
                yield record
