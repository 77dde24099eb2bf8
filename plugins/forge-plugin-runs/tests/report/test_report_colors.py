"""Colours of curves: any two runs can be told apart, by their dashes or by colours that no eye confuses."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import combinations

import numpy as np
import pytest

from forge_plugin_runs.report.chart_svg import COLORS, color_classes

SEEN = {
    "all colours": np.eye(3),
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
"""What an eye makes of linear RGB (Machado et al. 2009)."""
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.0888])
APART = 15.0
"""Distance in CIELAB; 2 can just be seen side by side."""


def lab(color: str, eye: object) -> np.ndarray:
    encoded = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(np.asarray(eye) @ linear, 0, 1) / WHITE
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("eye", SEEN)
def test_runs_with_equal_dashes_have_colours_that_are_far_apart(theme: int, eye: str) -> None:
    css = files("forge_plugin_runs.report").joinpath("page.css").read_text().split("@media")[theme]
    colors = dict(re.findall(r"--(c\d): (#[0-9a-f]{6})", css))
    runs = [color_classes(number).split() for number in range(COLORS)]
    for (one, dashes), (two, others) in combinations(runs, 2):
        near = np.linalg.norm(lab(colors[one], SEEN[eye]) - lab(colors[two], SEEN[eye])) < APART
        assert not (near and dashes == others), (one, two)


def test_no_two_of_many_runs_look_the_same() -> None:
    assert len({color_classes(number) for number in range(4 * COLORS)}) == 4 * COLORS
