"""template_name keeps the contracts of plugins and of stages, and does what it says."""

import torch
from forge_plugin_template_name import TemplateName

from forge_testing.distribution import check_distribution
from forge_testing.suites import StageSuite


def test_the_distribution():
    check_distribution("forge-plugin-template-name")


class TestTemplateName(StageSuite):
    component = TemplateName(every=1)
    ranks = 2


def test_every_nth_layer_runs_again_in_the_backward_pass(build, make_job):
    run = build(make_job(parallel={"template_name": TemplateName(every=2)}))
    calls = []
    for name, layer in run.model.layers.items():
        layer.up.register_forward_hook(lambda *_, name=name: calls.append(name))
    ids = torch.arange(8).unsqueeze(0)
    run.model({"input_ids": ids}).sum().backward()
    assert calls == ["0", "1", "0"]
