"""template_name keeps the contracts of plugins and of schedules, and does what it says."""

import pytest
from forge_plugin_template_name import TemplateName

from forge_testing.distribution import check_distribution
from forge_testing.suites import SchedulerSuite


def test_the_distribution():
    check_distribution("forge-plugin-template-name")


class TestTemplateName(SchedulerSuite):
    component = TemplateName(warmup_steps=5)


def test_the_rate_rises_to_its_base_value_and_falls_towards_zero():
    schedule = TemplateName(warmup_steps=2, power=2.0).build(context=None)
    assert [schedule(step, 6) for step in range(6)] == [0.5, 1.0, 1.0, 0.5625, 0.25, 0.0625]


def test_a_power_of_zero_is_refused():
    with pytest.raises(ValueError, match="'power' must be > 0"):
        TemplateName(power=0.0)
