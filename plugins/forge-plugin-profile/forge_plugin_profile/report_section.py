"""The section `profile` of `forge-run report`: where a step went, by the newest window of `[hooks.profile]`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from attrs import frozen

from forge_kit.tools.report_sections import Bars, Block, Preformatted, ReportRun, ReportSection

WINDOW = re.compile(r"step-(\d+)")
COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#edc948", "#76b7b2", "#9c755f", "#ff9da7", "#8d949b")


@frozen(kw_only=True)
class ProfileSection(ReportSection):
    """Phases of a step as a bar for each run, and the summary of its newest profile."""

    title: ClassVar[str] = "Profile"
    place: ClassVar[float] = 75.0

    def blocks(self, runs: Sequence[ReportRun]) -> Iterable[Block]:
        windows = [(run, window) for run in runs if (window := newest_window(run.folder)) is not None]
        facts = [(run, _first_rank(run, window)) for run, window in windows]
        if bars := [(run, each["phases"]) for run, each in facts if each.get("phases")]:
            # Over all runs together, so that a phase has the same colour in each
            names = list(dict.fromkeys(phase["name"] for _, phases in bars for phase in phases))
            sizes = [{phase["name"]: float(phase["host_s"]) for phase in phases} for _, phases in bars]
            yield Bars(
                title="Phases of a step, wall time of the main thread",
                parts={name: COLORS[number % len(COLORS)] for number, name in enumerate(names)},
                rows=[(run, [own.get(name, 0.0) for name in names]) for (run, _), own in zip(bars, sizes, strict=True)],
            )
        for run, window in windows:
            if text := run.text(f"profile/{window}/profile.md").strip():
                yield Preformatted(title=f"Profile of {run.name}", text=text)


def newest_window(folder: Path) -> str | None:
    """Returns the folder of the newest window below `profile/`; None without any."""
    steps = [int(match[1]) for path in (folder / "profile").glob("*/") if (match := WINDOW.fullmatch(path.name))]
    return f"step-{max(steps)}" if steps else None


def _first_rank(run: ReportRun, window: str) -> Mapping[str, Any]:
    ranks = run.json(f"profile/{window}/profile.json").get("ranks") or [{}]
    return ranks[0]
