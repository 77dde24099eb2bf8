"""template_name keeps the contracts of plugins, and what it loads those of datasets."""

from forge_plugin_template_name import TemplateName

from forge_core.contracts.layout import Layout
from forge_testing import Numbers
from forge_testing.distribution import check_distribution
from forge_testing.suites import DatasetSuite


def test_the_distribution():
    check_distribution("forge-plugin-template-name")


class TestTemplateName(DatasetSuite):
    """On numbers."""

    component = Numbers()
    job = {"data": {"loader": TemplateName()}}
    one_thread = True


def test_a_run_has_the_losses_that_it_has_with_the_loader_of_the_core(make_job, train, lines):
    loader = TemplateName(ahead=2)
    jobs = [make_job(job={"name": "core"}), make_job(job={"name": "own"}, data={"loader": loader})]
    core, own = ([line["loss"] for line in lines(train(job))] for job in jobs)
    assert own == core


def test_workers_are_refused(make_job):
    job = make_job(data={"loader": TemplateName(), "workers": 2})
    [problem] = TemplateName().problems(job, Layout())
    assert str(problem).startswith("type: reads in one thread, but data.workers = 2")
