"""template_name keeps the contracts of plugins and of models, and does what it says."""

import torch
from forge_plugin_template_name import TemplateName

from forge_testing.distribution import check_distribution
from forge_testing.suites import ModelSuite


def test_the_distribution():
    check_distribution("forge-plugin-template-name")


class TestTemplateName(ModelSuite):
    component = TemplateName(vocab_size=32, dim=16, layers=2, heads=2)


def test_later_positions_do_not_matter_to_earlier_ones(build, make_job):
    model = build(make_job(model=TemplateName(vocab_size=32, dim=16, layers=2, heads=2))).model
    ids = torch.arange(8).unsqueeze(0)
    changed = ids.clone()
    changed[0, 5:] = 9
    before, after = model({"input_ids": ids}), model({"input_ids": changed})
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])
