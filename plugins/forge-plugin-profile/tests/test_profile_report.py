"""Profiles in `forge-run report`."""

from __future__ import annotations

from pathlib import Path

from profile_traces import cpu_trace

from forge_kit.tools.report_sections import Bars, Preformatted, ReportRun
from forge_plugin_profile.breakdown import breakdown
from forge_plugin_profile.recording import write_summary
from forge_plugin_profile.report_section import ProfileSection
from forge_plugin_profile.trace import trace_of


def test_the_newest_window_is_shown(tmp_path: Path) -> None:
    facts = breakdown(trace_of(cpu_trace()))
    write_summary(tmp_path / "profile/step-9", [{**facts, "phases": []}])
    write_summary(tmp_path / "profile/step-10", [facts])
    bars, text = ProfileSection().blocks([ReportRun(number=0, name="a", folder=tmp_path)])
    assert isinstance(bars, Bars)
    assert isinstance(text, Preformatted)
    [(_, sizes)] = bars.rows
    assert dict(zip(bars.parts, sizes, strict=True)) == {row["name"]: row["host_s"] for row in facts["phases"]}
    assert sum(sizes) > 0
    assert text.text == (tmp_path / "profile/step-10/profile.md").read_text().strip()


def test_a_run_without_any_has_no_section(tmp_path: Path) -> None:
    assert list(ProfileSection().blocks([ReportRun(number=0, name="a", folder=tmp_path)])) == []
