"""template_name keeps the contracts of plugins and of optimizers, and does what it says."""

import torch
from forge_plugin_template_name import TemplateName
from forge_plugin_template_name.momentum import MomentumDescent

from forge_testing.distribution import check_distribution
from forge_testing.suites import OptimizerSuite


def test_the_distribution():
    check_distribution("forge-plugin-template-name")


class TestTemplateName(OptimizerSuite):
    component = TemplateName(lr=3e-2)


def test_gradients_of_earlier_updates_count_less_and_less():
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = MomentumDescent([{"params": [weight]}], lr=0.25, momentum=0.5)
    found = []
    for gradient in (1.0, 0.0, 0.0):
        weight.grad = torch.tensor([gradient])
        optimizer.step()
        found.append(weight.item())
    assert found == [0.75, 0.625, 0.5625]
