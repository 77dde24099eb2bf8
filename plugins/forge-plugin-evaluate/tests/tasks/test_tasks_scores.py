"""Metrics, by the formulas of OLMES, computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forge_plugin_evaluate.tasks import Item
from forge_plugin_evaluate.tasks.scores import METRICS, metrics_of

ITEMS = [Item("", (" ab", " abcd"), 1), Item("", (" ä", " abc"), 0), Item("", (" a", " b", " c"), 2)]
LOG_PROBABILITIES = np.array([-2.0, -3.0, -2.1, -3.2, -5.0, -4.0, -4.5])


def test_metrics():
    metrics = metrics_of(ITEMS, LOG_PROBABILITIES, list(METRICS))
    # acc: -2 > -3 wrong; -2.1 > -3.2 right; -4 > -4.5 wrong.
    assert metrics["acc"] == pytest.approx(1 / 3)
    # A character: -1 < -0.75 right; -2.1 < -1.07 wrong; wrong. A byte: "ä" has two, so -1.05 > -1.07 is right.
    assert metrics["acc_per_char"] == pytest.approx(1 / 3)
    assert metrics["acc_per_byte"] == pytest.approx(2 / 3)
    bits = [3.0 / 4 / math.log(2), 2.1 / 2 / math.log(2), 4.5 / math.log(2)]
    assert metrics["bits_per_byte"] == pytest.approx(sum(bits) / 3)


def test_standard_errors():
    metrics = metrics_of(ITEMS, LOG_PROBABILITIES, ["acc"])
    # Of a share p of n items: sqrt(p (1 - p) / (n - 1)).
    assert metrics["acc_stderr"] == pytest.approx(math.sqrt(1 / 3 * 2 / 3 / 2))
    assert metrics_of(ITEMS[:1], LOG_PROBABILITIES[:2], ["acc"]) == {"acc": 0.0}


def test_with_one_choice_there_are_bits_alone():
    items = [Item("", (" a",), 0), Item("", (" b",), 0)]
    assert set(metrics_of(items, np.array([-1.0, -2.0]), list(METRICS))) == {"bits_per_byte", "bits_per_byte_stderr"}


def test_a_first_choice_wins_a_tie():
    assert metrics_of([Item("", (" a", " b"), 0)], np.array([-1.0, -1.0]), ["acc"]) == {"acc": 1.0}
