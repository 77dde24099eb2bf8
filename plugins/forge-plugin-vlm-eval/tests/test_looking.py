"""Evaluation `looking`."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from forge_plugin_vision import VisionLanguage
from forge_plugin_vision.kinds import GRIDS, PATCHES
from forge_plugin_vlm_eval import Looking
from forge_plugin_vlm_eval.looking import ImageRows
from forge_testing.refusals import at, check_problems, problems_of
from forge_testing.vision import RandomImages, tiny_language, tiny_vision

MODEL = VisionLanguage(language=tiny_language(), vision=tiny_vision())


def rows(count: int) -> list[dict[str, np.ndarray]]:
    """Rows of one patch, numbered; every third has no image."""
    return [
        {
            "input_ids": np.array([-1, 5]),
            "labels": np.array([5, 6]),
            PATCHES: np.full((1, 4), number, np.uint8),
            GRIDS: np.array([[1, 1, 1]]) * (number % 3 > 0),
        }
        for number in range(count)
    ]


def test_rows_see_images_from_afar():
    seen = ImageRows(rows(5), "other")
    assert [int(seen[number][PATCHES][0, 0]) for number in (1, 2, 4)] == [4, 4, 1]


def test_rows_without_images_do_not_count():
    for kind in ("own", "other", "grey"):
        labels = [ImageRows(rows(5), kind)[number]["labels"].tolist() for number in range(3)]
        assert labels == [[-100, -100], [5, 6], [5, 6]]


def test_grey_rows_are_grey_and_nothing_else():
    row = ImageRows(rows(5), "grey")[1]
    assert (row[PATCHES] == 128).all()
    assert row["input_ids"].tolist() == [-1, 5]


def test_a_run_logs_the_losses_and_their_difference(make_job, train):
    data = {"sources": (RandomImages(held_out=6),)}
    job = make_job(model=MODEL, data=data, evaluations={"looking": Looking()}, seq_len=24, steps=2)
    records = (train(job).folder / "metrics.jsonl").read_text().splitlines()
    [last] = [record for record in map(json.loads, records) if "looking/bits" in record]
    assert last["looking/bits"] == pytest.approx((last["looking/other_loss"] - last["looking/own_loss"]) / math.log(2))
    assert len({last[f"looking/{kind}_loss"] for kind in ("own", "other", "grey")}) == 3


def test_a_model_without_images_is_refused(make_job):
    problems = problems_of(make_job(evaluations={"looking": Looking()}))
    check_problems(problems, at("evaluations.looking", "TinyModel"))
