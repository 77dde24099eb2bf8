"""What sections of a report are made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_kit.tools.report_sections import Line, ReportRun
from forge_testing.refusals import naming


def test_a_line_has_as_many_places_as_values() -> None:
    run = ReportRun(number=0, name="run", folder=Path("run"))
    assert len(Line(run=run, x=[1, 2], y=[3.0, 4.0]).y) == 2
    for x in ([1], [1, 2, 3]):
        with pytest.raises(ValueError, match=naming(f"{len(x)} places", "2 values")):
            Line(run=run, x=x, y=[3.0, 4.0])
