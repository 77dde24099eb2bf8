"""Files of points and fits: every digit, and errors that say where."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from attrs import evolve
from known_ladders import ladder

from forge_core.contracts.errors import JobError
from forge_plugin_ladder import Additive, Point
from forge_plugin_ladder.fitting import fit
from forge_plugin_ladder.intervals import resample
from forge_plugin_ladder.points import read_points, write_points
from forge_plugin_ladder.store import read_fit, write_fit

POINT = {"run": "a", "parameters": 1e6, "parameters_total": 1.1e6, "tokens": 2e7, "flops": 1.2e14, "loss": 3.0}


def test_points_keep_every_digit(tmp_path):
    points = ladder(noise=0.01)[:3]
    points += [evolve(points[0], run="failed", loss=math.nan, failed="diverged"), evolve(points[1], unique_tokens=1e7)]
    write_points(tmp_path / "points.json", points)
    read = read_points(tmp_path / "points.json")
    assert [repr(each) for each in read] == [repr(each) for each in points]
    assert [each.usable for each in read] == [True, True, True, False, True]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (POINT | {"params": 3}, "points\\[0\\]: unknown key 'params'"),
        ({key: value for key, value in POINT.items() if key != "tokens"}, "points\\[0\\] has no tokens"),
        (POINT | {"tokens": -1}, "'tokens' must be > 0"),
        (POINT | {"loss": "3.0"}, "loss"),
        ([1, 2], "no table of a point's keys"),
    ],
)
def test_a_wrong_point_is_named(tmp_path, row, message):
    path = tmp_path / "points.json"
    path.write_text(json.dumps({"schema": 1, "points": [row]}))
    with pytest.raises(JobError, match=message):
        read_points(path)


@pytest.mark.parametrize("text", ["", "[]", '{"points": []}', '{"schema": 2, "points": []}'])
def test_another_file_is_no_table_of_points(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(JobError, match="points"):
        read_points(tmp_path / "other.json")


def test_a_file_of_the_users_is_not_overwritten(tmp_path):
    (tmp_path / "points.json").write_text("mine")
    with pytest.raises(JobError, match="exists already"):
        write_points(tmp_path / "points.json", [Point(**POINT)])
    assert (tmp_path / "points.json").read_text() == "mine"


def test_a_fit_keeps_every_digit_and_knows_its_points(tmp_path):
    points, law, path = ladder(noise=0.005), Additive(), tmp_path / "fit.json"
    made = resample(fit(law, points), points, count=5)
    write_fit(path, made, points, "parameters", "additive")
    read = read_fit(path, law, points, "parameters", "additive")
    assert np.array_equal(read.exponents, made.exponents)
    assert np.array_equal(read.coefficients, made.coefficients)
    assert np.array_equal(read.residuals, made.residuals)
    assert read.fit.values() == made.fit.values()
    assert read.widened == made.widened
    changed = [evolve(points[0], loss=points[0].loss + 1e-15), *points[1:]]
    for own, count, type_, message in (
        (changed, "parameters", "additive", "other points"),
        (points, "parameters_total", "additive", "other count"),
        (points, "parameters", "mine", "other law"),
    ):
        with pytest.raises(JobError, match=message):
            read_fit(path, law, own, count, type_)
    path.write_text(path.read_text()[:-40])
    with pytest.raises(JobError, match="cannot be read"):
        read_fit(path, law, points, "parameters", "additive")
    with pytest.raises(JobError, match="fit` first"):
        read_fit(tmp_path / "none.json", law, points, "parameters", "additive")
