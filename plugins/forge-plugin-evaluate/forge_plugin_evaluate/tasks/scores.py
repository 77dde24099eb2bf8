"""From the log-probabilities of choices to metrics, as OLMES defines them (Gu et al. 2024, arXiv 2406.08446)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from forge_plugin_evaluate.tasks.kinds import Item

Scores = Mapping[str, float]


def characters(choice: str) -> int:
    """Characters of a choice, without the spaces that separate it from its context."""
    return len(choice.strip())


def utf8_bytes(choice: str) -> int:
    """Bytes of a choice in UTF-8, without the spaces that separate it from its context."""
    return len(choice.strip().encode())


def metrics_of(items: Sequence[Item], log_probabilities: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """The mean of each metric over the items, and its standard error as `NAME_stderr` if there are at least two items.

    Args:
        items: I items.
        log_probabilities: natural logarithms of the probability of each choice, one item after the other.
        names: the metrics: keys of `METRICS`.
    """
    metrics: dict[str, float] = {}
    for name in names:
        measure, needs_choice = METRICS[name]
        if needs_choice and all(len(item.choices) == 1 for item in items):
            continue  # there was nothing to choose
        values, start = np.empty(len(items)), 0
        for number, item in enumerate(items):
            values[number] = measure(item, log_probabilities[start : start + len(item.choices)])
            start += len(item.choices)
        metrics[name] = float(values.mean())
        if len(items) > 1:
            # Of a sample (ddof 1), as lm-evaluation-harness has it
            metrics[f"{name}_stderr"] = float(values.std(ddof=1)) / math.sqrt(len(items))
    return metrics


def _accuracy(size: Callable[[str], int]) -> Callable[[Item, np.ndarray], float]:
    def measure(item: Item, log_probabilities: np.ndarray) -> float:
        sizes = np.array([size(choice) for choice in item.choices])
        return float(np.argmax(log_probabilities / sizes) == item.answer)

    return measure


def _bits_per_byte(item: Item, log_probabilities: np.ndarray) -> float:
    return float(-log_probabilities[item.answer]) / math.log(2) / utf8_bytes(item.choices[item.answer])


METRICS: Mapping[str, tuple[Callable[[Item, np.ndarray], float], bool]] = {
    "acc": (_accuracy(lambda choice: 1), True),
    "acc_per_char": (_accuracy(characters), True),
    "acc_per_byte": (_accuracy(utf8_bytes), True),
    "bits_per_byte": (_bits_per_byte, False),
}
"""Metrics of one item by name, and whether they need more than one choice."""
