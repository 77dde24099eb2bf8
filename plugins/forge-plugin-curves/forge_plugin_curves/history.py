"""What a run has measured so far, as series over steps."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import define, field


@define
class Series:
    """Values of one metric; those that were not finite are NaN or infinite."""

    steps: list[int] = field(factory=list)
    values: list[float] = field(factory=list)

    def __len__(self) -> int:
        return len(self.values)

    def smoothed(self, window: int) -> list[float]:
        """Means over `window` neighbours, centred so that the line does not lag behind.

        At the start, where curves are steep, the window shrinks on both sides; at the end it only loses what is yet to
        come. Values that are not finite are left out.
        """
        finite = [value if math.isfinite(value) else 0.0 for value in self.values]
        sums = [0.0, *itertools.accumulate(finite)]
        counts = [0, *itertools.accumulate(map(math.isfinite, self.values))]
        means = []
        for index in range(len(self)):
            reach = min(window // 2, index)
            first, last = index - reach, min(index + reach + 1, len(self))
            count = counts[last] - counts[first]
            means.append((sums[last] - sums[first]) / count if count else math.nan)
        return means


class History:
    """Every metric of every line."""

    def __init__(self) -> None:
        self._series: dict[str, Series] = {}

    @classmethod
    def read(cls, path: Path, last_step: int) -> History:
        """From JSON lines, up to and with `last_step`. A torn last line is left out."""
        history = cls()
        for record in _records(path):
            if record["step"] <= last_step:
                history.add(record)
        return history

    def add(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            number = _number(value)
            if name != "step" and number is not None:
                series = self._series.setdefault(name, Series())
                series.steps.append(record["step"])
                series.values.append(number)

    def __getitem__(self, name: str) -> Series:
        """The series of a metric; empty if there is none."""
        return self._series.get(name, Series())

    def __len__(self) -> int:
        return sum(map(len, self._series.values()))


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def _number(value: Any) -> float | None:
    """Numbers, and the strings in which JSON lines keep those that are not finite."""
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        return None
    return float(value)
