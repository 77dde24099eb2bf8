"""`none`, `inverse_sqrt` and `sequential` against closed forms, and what `sequential` refuses."""

from __future__ import annotations

import math

import pytest

from forge_core.config.load import load_job
from forge_core.contracts.layout import Layout
from forge_plugin_schedules import InverseSqrt, NoSchedule
from forge_testing.refusals import at, check_problems, refuses

JOB = """
[job]
output = "{output}"
[train]
steps = 10
global_batch_size = 4
seq_len = 8
[model]
type = "forge_testing:TinyModel"
[optimizer]
type = "forge_testing:TinyAdamW"
lr = 1.0
[[data.sources]]
type = "forge_testing:Numbers"
[scheduler]
type = "sequential"
"""


def values(component, total):
    schedule = component.build(None)
    return [schedule(step, total) for step in range(total)]


def test_none_is_the_base_rate():
    assert values(NoSchedule(), 3) == [1.0] * 3


def test_inverse_sqrt_is_that_of_the_paper():
    updates = range(1, 41)
    expected = [4**0.5 * min(n**-0.5, n * 4**-1.5) for n in updates]  # Vaswani et al., equation 3, scaled to 1
    assert values(InverseSqrt(warmup_steps=4), 40) == pytest.approx(expected)


def test_inverse_sqrt_falls_by_its_timescale():
    found = values(InverseSqrt(warmup_steps=2, timescale=8), 12)
    assert found[:2] == pytest.approx([0.5, 1.0])
    assert found[2:] == pytest.approx([math.sqrt(8 / (8 + n)) for n in range(1, 11)])
    assert values(InverseSqrt(timescale=8), 9)[8] == pytest.approx(math.sqrt(8 / 17))


def test_inverse_sqrt_needs_a_timescale(make_job):
    check_problems(InverseSqrt().problems(make_job(), Layout()), at("timescale", 0, "warmup_steps"))


def sequential(tmp_path, catalog, parts):
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(output=tmp_path) + parts)
    return load_job(path, catalog=catalog)


THREE = """
[[scheduler.parts]]
until = 3
schedule = { type = "constant", warmup_steps = 2 }
[[scheduler.parts]]
until = 7
schedule = { type = "linear", min_ratio = 0.2 }
[[scheduler.parts]]
scale = 0.5
[scheduler.parts.schedule]
type = "cosine"
warmup_steps = 1
"""


def test_sequential_runs_each_part_as_a_run_of_its_own(tmp_path, catalog, train, lines):
    found = lines(train(sequential(tmp_path, catalog, THREE)))
    third = [0.5, *(0.25 * (1 + math.cos(math.pi * p)) for p in (0, 0.5))]
    assert [line["lr"] for line in found] == pytest.approx([0.5, 1, 1, 1, 0.8, 0.6, 0.4, *third])


PART = '[[scheduler.parts]]\nschedule = {{ type = "{type}" }}\n{until}\n'


def parts(*ends, type_="constant"):
    return "".join(
        PART.format(type=type_ if number else "constant", until=f"until = {end}" if end is not None else "")
        for number, end in enumerate(ends)
    )


@pytest.mark.parametrize(
    ("wrong", "path", "facts"),
    [
        (parts(None, None), "parts.0.until", ["missing"]),
        (parts(2, 5), "parts.1.until", [5, "last part"]),
        (parts(5, 5, None), "parts.1.until", ["more than 5"]),
        (parts(10, None), "parts.0.until", [10, "train.steps is 10"]),
        (
            THREE.replace("warmup_steps = 2", "warmup_steps = 4"),
            "parts.0.schedule.warmup_steps",
            [4, "train.steps is 3", "3 updates"],
        ),
        (
            THREE.replace("warmup_steps = 2", "warmup_steps = 11"),
            "parts.0.schedule.warmup_steps",
            [11, "train.steps is 10"],
        ),
        ("parts = []", "parts", ["empty"]),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, catalog, wrong, path, facts):
    with refuses(f"scheduler.{path}", *facts):
        sequential(tmp_path, catalog, wrong)
