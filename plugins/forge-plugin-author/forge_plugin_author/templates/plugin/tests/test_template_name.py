"""template_name keeps the contracts of plugins, and does what it says."""

import pytest
from forge_plugin_template_name import TemplateName

from forge_core import JobError
from forge_testing.distribution import check_distribution
from forge_testing.suites import HookSuite


def test_the_distribution():
    check_distribution("forge-plugin-template-name")


class TestTemplateName(HookSuite):
    component = TemplateName(match="layers.*")
    changes_training = True


def frozen_in(run):
    return {name for name, parameter in run.model.named_parameters() if not parameter.requires_grad}


def test_what_fits_is_frozen_and_nothing_else(build, make_job):
    run = build(make_job(plugins={"template_name": TemplateName(match="*norm*")}))
    assert frozen_in(run) == {"norm.weight", "norm.bias"}


def test_a_pattern_that_fits_nothing_is_told(build, make_job):
    with pytest.raises(JobError, match=r"no parameter fits match = 'hed.*'; there are embedding.weight, "):
        build(make_job(plugins={"template_name": TemplateName(match="hed.*")}))
