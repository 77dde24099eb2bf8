"""template_name keeps the contracts of plugins, and trains like the core's executor."""

from forge_plugin_template_name import TemplateName
from torch.profiler import profile

from forge_testing.distribution import check_distribution


def test_the_distribution():
    check_distribution("forge-plugin-template-name")


def test_a_run_has_the_losses_of_the_plain_executor(make_job, train, lines):
    def losses(name, **changes):
        job = make_job(job={"name": name}, steps=6, micro_batch_size=2, eval={"interval": 3}, **changes)
        return [line["loss"] for line in lines(train(job))]

    assert losses("labelled", executor=TemplateName()) == losses("plain")


def test_the_profiler_sees_the_labels(make_job, train):
    job = make_job(executor=TemplateName(label="part"), steps=1, micro_batch_size=2)
    with profile() as seen:
        train(job)
    found = {event.key for event in seen.key_averages() if event.key.startswith("part ")}
    assert found >= {"part 1 forward", "part 1 backward", "part 2 forward", "part 2 backward"}
