"""Standard errors of in-loop tasks are those of the harness."""

from __future__ import annotations

import numpy as np
import pytest
from lm_eval.api.metrics import mean_stderr

from forge_plugin_evaluate.tasks import Item
from forge_plugin_evaluate.tasks.scores import METRICS, metrics_of


def test_standard_errors_of_tasks_in_training_are_those_of_the_harness():
    draw = np.random.default_rng(0)
    items = [Item("", (" a", " bcd", " ef"), int(answer)) for answer in draw.integers(0, 3, 23)]
    log_probabilities = draw.normal(-4.0, 2.0, 3 * len(items))
    metrics = metrics_of(items, log_probabilities, list(METRICS))
    rows = log_probabilities.reshape(-1, 3)
    answers = np.array([item.answer for item in items])
    lengths = np.array([1, 3, 2])
    by_item = {
        "acc": (rows.argmax(1) == answers).astype(float),
        "acc_per_char": ((rows / lengths).argmax(1) == answers).astype(float),
        "bits_per_byte": -rows[np.arange(len(items)), answers] / np.log(2) / lengths[answers],
    }
    for name, values in by_item.items():
        assert values.std() > 0
        assert metrics[name] == pytest.approx(values.mean(), rel=1e-12)
        assert metrics[f"{name}_stderr"] == pytest.approx(mean_stderr(values.tolist()), rel=1e-12)
