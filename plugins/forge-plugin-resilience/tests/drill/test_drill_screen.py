"""The table of a drill on a terminal."""

from __future__ import annotations

import pytest

from forge_plugin_resilience.drill.results import Result
from forge_plugin_resilience.drill.screen import Screen

HELD = Result(
    fault="kill",
    rank=0,
    title="rank 0 killed",
    held=True,
    found_after_s=1.25,
    said="signal 9",
    steps_lost=2,
    curve="equal",
)
FAILED = Result(
    fault="freeze",
    rank=1,
    title="rank 1 frozen",
    reason="never found",
    fix="set train.hang_timeout_s",
    log="runs/1.log",
)


@pytest.mark.parametrize("width", [100, 180])
def test_faults_that_did_not_hold_are_red_and_listed_with_the_fix(monkeypatch, capsys, width) -> None:
    for name, value in {"COLUMNS": width, "FORCE_COLOR": 1, "TERM": "xterm"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Screen(quiet=False)
    screen.table([HELD, FAILED], {"full_disk": "needs a disk of its own"})
    lines = capsys.readouterr().out.splitlines()
    red = [line for line in lines if "\x1b[1;31m" in line]
    assert [line for line in red if FAILED.title not in line] == []
    assert len(red) == 2  # its row, and the reason below
    assert "never found" in red[1]
    row = next(line for line in lines if HELD.title in line)
    assert [figure in row for figure in ("1.2 s", " 2 ", "equal")] == [True] * 3
    assert ("signal 9" in row) == (width == 180)
    text = "\n".join(lines)
    assert [part in text for part in (FAILED.fix, FAILED.log, "full_disk", "signal 9")] == [True] * 4
