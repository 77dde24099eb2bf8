"""The section of `training_stats` in `forge-run report`."""

from __future__ import annotations

import json
import math

import pytest
from stats_jobs import job, lines, stats

from forge_kit.tools.report_sections import HeatMap, ReportRun, Table
from forge_plugin_taps.stats import Limit, NoiseScale
from forge_plugin_taps.stats.report_section import TrainingStatsSection


def blocks(folder):
    return list(TrainingStatsSection().blocks([ReportRun(number=0, name="a", folder=folder)]))


@pytest.mark.filterwarnings("ignore:training_stats")
def test_maps_have_each_group_and_step_and_the_table_the_last_figures(tmp_path):
    limits = (Limit(metric="stats/update_ratio/layers.*/matrix", above=1e-9), Limit(metric="loss", below=1.0))
    found = lines(job(tmp_path, stats(limits=limits), plugins={"noise_scale": NoiseScale(interval=2)}))
    noise, logits, ratio, weight, gradient, table, broken = blocks(tmp_path / "run")
    for chart, name in ((noise, "stats/noise_scale"), (logits, "stats/logits/max")):
        [line] = chart.lines
        assert dict(zip(line.x, line.y, strict=True)) == {step: found[step][name] for step in (2, 4)}
    groups = ["embedding/embedding", "head/head", "layers.0/matrix", "layers.0/norm"]
    assert [each.rows[:4] for each in (ratio, weight, gradient)] == [groups] * 3
    assert ratio.values[2] == pytest.approx(
        [3 + math.log10(found[step]["stats/update_ratio/layers.0/matrix"]) for step in (2, 4)]
    )
    assert weight.values[-1] == pytest.approx(
        [0.0, math.log2(found[4]["stats/weight_norm/model"] / found[2]["stats/weight_norm/model"])]
    )
    assert sum(gradient.values[0]) == pytest.approx(0, abs=0.2)
    assert table.head == ["group", "weight norm", "gradient norm", "update norm", "update ratio"]
    assert table.rows[2] == [
        "layers.0/matrix",
        *(found[4][f"stats/{kind}/layers.0/matrix"] for kind in ("weight_norm", "gradient_norm", "update_norm")),
        found[4]["stats/update_ratio/layers.0/matrix"],
    ]
    assert isinstance(broken, Table)
    assert broken.rows == [[f"stats/update_ratio/layers.{layer}/matrix", "at most 1e-09", 2, 2, 4] for layer in (0, 1)]
    assert all(isinstance(each, HeatMap) for each in (ratio, weight, gradient))


def test_the_peaks_of_memory_are_the_largest_of_all_samples(tmp_path):
    rows = [
        {"step": step, "loss": 1.0, "stats/memory/forward_gb": step, "stats/memory/backward_gb": 9} for step in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [table] = blocks(tmp_path)
    assert table.head == ["run", "forward", "backward", "optimizer"]
    assert [row[1:] for row in table.rows] == [[2.0, 9.0, 0.0]]


def test_a_run_without_the_hook_has_no_section(tmp_path):
    assert blocks(tmp_path) == []
