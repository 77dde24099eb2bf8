"""Rules against the papers' formulas."""

from __future__ import annotations

import math

import pytest

from forge_plugin_ladder.rules import Fixed, Power, PowerLines, Scale, SqrtBatch, StepLawBatch, StepLawRate

SCALE = Scale(parameters=2e8, parameters_total=3e8, tokens=8e9, batch_tokens=4e5, seq_len=2048)


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        (Fixed(to=0.1), 0.1),
        (Power(at_reference=3e-3, parameters=2e7, by_parameters=-0.3), 3e-3 * 10**-0.3),
        (Power(at_reference=1.0, tokens=8e8, by_tokens=0.5, batch_tokens=1e5, by_batch=0.5), math.sqrt(10) * 2),
        (SqrtBatch(at_reference=1e-3, batch_tokens=1e5), 2e-3),
        (PowerLines(at_reference=64, tokens=8e8), 64 * 10**0.383),
        (StepLawRate(), 1.79 * 2e8**-0.713 * 8e9**0.307),
        (StepLawBatch(), 0.58 * 8e9**0.571 / 2048),
    ],
)
def test_values_are_the_formulas(rule, value):
    assert rule.value(SCALE) == pytest.approx(value, rel=1e-12)
    assert not rule.warning(SCALE)


def test_what_was_measured_elsewhere_is_said():
    tiny = Scale(parameters=1e6, parameters_total=1e6, tokens=2e7, batch_tokens=1e4, seq_len=64)
    for rule in (StepLawRate(), StepLawBatch()):
        assert "from 60M to 1B parameters" in rule.warning(tiny)
