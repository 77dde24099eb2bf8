"""template_name keeps the contracts of plugins, and does what it says."""

import json

import pytest
from forge_plugin_template_name import TemplateName

from forge_testing.distribution import check_distribution


def test_the_distribution():
    check_distribution("forge-plugin-template-name")


@pytest.fixture
def share(make_job, train):
    """Bound -> what a run logs in its last evaluation."""

    def run(below):
        job = make_job(evaluations={"share": TemplateName(below=below)}, steps=4, eval={"interval": 4})
        records = map(json.loads, (train(job).folder / "metrics.jsonl").read_text().splitlines())
        key = "eval/template_name"
        return [record[key] for record in records if key in record][-1]

    return run


def test_every_loss_is_below_a_high_bound(share):
    assert share(100.0) == 1.0


def test_no_loss_is_below_a_low_bound(share):
    assert share(1e-6) == 0.0


def test_a_bound_of_zero_is_refused():
    with pytest.raises(ValueError, match="'below' must be > 0"):
        TemplateName(below=0.0)
