"""template_name keeps the contracts of plugins, and what it loads those of datasets."""

from forge_plugin_template_name import TemplateName

from forge_core.data.loader import TrainLoader
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


def test_it_loads_what_the_loader_of_the_core_loads(make_job, build):
    batches = []
    for data in ({}, {"loader": TemplateName(ahead=2)}):
        run = build(job := make_job(data=data))
        loader = TrainLoader(job, run.datasets, run.context)
        batches.append([loader.next_step()[0]["input_ids"].tolist() for _ in range(5)])
        loader.close()
    assert batches[0] == batches[1]


def test_workers_are_refused(make_job):
    job = make_job(data={"loader": TemplateName(), "workers": 2})
    [problem] = job.data.loader.problems(job, None)
    assert str(problem).startswith("type: reads in one thread, but data.workers = 2")
