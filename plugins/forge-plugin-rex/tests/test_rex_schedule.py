"""`rex` against its closed forms."""

from __future__ import annotations

import pytest

from forge_core.config.load import load_job
from forge_plugin_rex import REX
from forge_testing import TINY_JOB


def values(component, total):
    schedule = component.build(None)
    return [schedule(step, total) for step in range(total)]


def test_the_published_curve():
    expected = [(1 - p) / (0.5 + 0.5 * (1 - p)) for p in (0, 0.2, 0.4, 0.6, 0.8)]
    assert values(REX(), 5) == pytest.approx(expected)
    assert REX().shape(1.0) == 0


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_polynomial(power):
    assert values(REX(power=power), 4) == pytest.approx([(1 - p) ** power for p in (0, 0.25, 0.5, 0.75)])


def test_it_stays_above_the_straight_line():
    line = values(REX(power=1.0), 50)
    assert all(rex > straight for rex, straight in zip(values(REX(), 50)[1:], line[1:], strict=True))


def test_warmup_and_floor_are_those_of_other_schedules():
    found = values(REX(warmup_steps=2, decay_steps=4, min_ratio=0.1), 8)
    decay = [0.1 + 0.9 * (1 - p) / (0.5 + 0.5 * (1 - p)) for p in (0, 0.25, 0.5, 0.75)]
    assert found == pytest.approx([0.5, 1, *decay, 0.1, 0.1])


def test_it_is_named_in_a_job_file(tmp_path, catalog, train, lines, make_job):
    path = tmp_path / "job.toml"
    path.write_text(f"""{TINY_JOB}
lr = 0.01
[job]
output = "{tmp_path}"
[scheduler]
type = "rex"
power = 2.0
""")
    found = lines(train(load_job(path, catalog=catalog)))
    assert [line["lr"] for line in found] == pytest.approx([0.01 * (1 - p) ** 2 for p in (0, 0.25, 0.5, 0.75)])


@pytest.mark.parametrize("power", [0.0, -1.0])
def test_a_power_that_does_not_fall_is_refused(power):
    with pytest.raises(ValueError, match="power"):
        REX(power=power)
