"""template_name keeps the contracts of plugins and of hooks, and does what it says."""

import pytest
from forge_plugin_template_name import TemplateName

from forge_core import JobError
from forge_testing.distribution import check_distribution
from forge_testing.suites import HookSuite


def test_the_distribution():
    check_distribution("forge-plugin-template-name")


class TestTemplateName(HookSuite):
    component = TemplateName(patience=100)


class Step:
    """What the hook uses of a `StepContext`."""

    stopped = ""

    def request_stop(self, reason):
        self.stopped = reason


def test_a_run_stops_once_nothing_gets_better():
    hook, step = TemplateName(patience=2), Step()
    stopped = []
    for loss in (3.0, 2.0, 2.5, 1.5, 1.5, 1.75):
        hook.on_eval_end(step, {"eval/loss": loss})
        stopped.append(step.stopped)
    assert stopped == [""] * 5 + ["eval/loss was lowest 2 evaluations ago"]


def test_a_metric_that_is_not_there_is_told():
    with pytest.raises(JobError, match="there is no metric 'eval/los'; evaluations give eval/loss"):
        TemplateName(metric="eval/los").on_eval_end(Step(), {"eval/loss": 1.0})
