"""Statistics of activations in `forge-run report`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from forge_kit.tools.report_sections import HeatMap, ReportRun, Table
from forge_plugin_taps.report_section import Activations


def figures(**changed: Any) -> dict[str, Any]:
    known = {"norm": 4.0, "mean": 0.0, "variance": 1.0, "kurtosis": 3.0, "max": 2.0, "dead": 0.0, "not_finite": 0}
    return {**known, "histogram": [1, 3, 4], **changed}


def blocks(folder: Path, *lines: dict[str, Any]) -> list[Any]:
    (folder / "taps").mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "taps/statistics.jsonl").write_text(text + '{"step": 9, "poi')  # killed within a line
    return list(Activations().blocks([ReportRun(number=0, name="a", folder=folder)]))


def test_maps_show_growth_outliers_and_the_distribution_by_point(tmp_path: Path) -> None:
    first = {"step": 2, "edges": [0, 1], "points": {"x": figures(), "y": figures(kurtosis=24.0)}}
    second = {"step": 4, "edges": [0, 1], "points": {"x": figures(norm=8.0), "y": figures(norm="nan")}}
    norm, kurtosis, histogram, table = blocks(tmp_path, first, first | {"step": 3}, second)
    assert isinstance(norm, HeatMap)
    assert norm.rows == ["x", "y"]
    assert norm.values[0] == [0.0, 0.0, 1.0]  # doubled at the last step
    assert norm.values[1][:2] == [0.0, 0.0]
    assert math.isnan(norm.values[1][2])
    assert kurtosis.values == [[0.0] * 3, [3.0, 3.0, 0.0]]
    assert histogram.values[0] == pytest.approx([0.125, 0.375, 0.5])
    assert isinstance(table, Table)
    assert table.head[:2] == ["point", "norm"]
    assert [row[:2] for row in table.rows] == [["x", 8.0], ["y", None]]


def test_a_point_without_finite_values_has_no_distribution(tmp_path: Path) -> None:
    line = {"step": 2, "edges": [0, 1], "points": {"x": figures(), "y": figures(histogram=[0, 0, 0], not_finite=8)}}
    histogram = blocks(tmp_path, line)[2]
    assert histogram.values[1] == [0.0, 0.0, 0.0]


def test_many_sampled_steps_are_thinned_and_end_with_the_last(tmp_path: Path) -> None:
    lines = [{"step": step, "points": {"x": figures(norm=float(step))}} for step in range(1, 1001)]
    norm, *_ = blocks(tmp_path, *lines)
    assert len(norm.values[0]) == 120
    assert "step 1 to 1,000" in norm.title


def test_a_run_without_any_has_no_section(tmp_path: Path) -> None:
    assert list(Activations().blocks([ReportRun(number=0, name="a", folder=tmp_path)])) == []
