"""template_name keeps the contracts of plugins and of routers, and does what it says."""

import torch
from forge_plugin_template_name import TemplateName

from forge_testing.distribution import check_distribution
from forge_testing.suites import RouterSuite


def test_the_distribution():
    check_distribution("forge-plugin-template-name")


class TestTemplateName(RouterSuite):
    component = TemplateName(top_k=2)


def test_the_weights_of_a_token_add_up_to_one():
    router = TemplateName(top_k=3).build(None, dim=4, experts=8)
    torch.nn.init.normal_(router.scores.weight)
    weights, experts = router(torch.randn(2, 5, 4), {})
    assert torch.allclose(weights.sum(-1), torch.ones(2, 5))
    assert experts.shape == (2, 5, 3)


def test_more_than_there_are_is_refused():
    assert list(TemplateName(top_k=8).expert_problems(8)) == []
    (problem,) = TemplateName(top_k=9).expert_problems(8)
    assert str(problem) == "top_k: 9, but there are 8 experts; lower it"
