"""template_name keeps the contracts of plugins, and what it packs those of datasets."""

import numpy as np
from forge_plugin_template_name import TemplateName

from forge_core.contracts.layout import Layout
from forge_core.data.windows import Window
from forge_testing import RandomDocuments
from forge_testing.distribution import check_distribution
from forge_testing.suites import DatasetSuite


def test_the_distribution():
    check_distribution("forge-plugin-template-name")


class TestTemplateName(DatasetSuite):
    """On documents in memory."""

    component = RandomDocuments()
    job = {"data": {"packing": TemplateName(unlearned=3)}}


def test_the_first_positions_are_not_learned():
    window = Window(np.arange(6), starts=None, learned=None)
    assert TemplateName(unlearned=2).sequence(window)["labels"].tolist() == [-100, -100, 3, 4, 5]


def test_what_leaves_nothing_to_learn_is_told(make_job):
    job = make_job(seq_len=8)
    [problem] = TemplateName(unlearned=8).problems(job, Layout())
    assert str(problem) == "unlearned: 8 leaves nothing to learn of train.seq_len = 8; lower it"
