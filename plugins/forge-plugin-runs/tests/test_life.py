"""Whether a run is alive, late or silent, in `forge-run runs` and `show`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from forge_core.checkpoint.run_folder import owned
from forge_core.cli import main
from forge_plugin_runs.life import pulse_of
from forge_testing.refusals import lacks


def lines(count: int, step_s: float, pause_s: float = 0.0, began: float = 1000.0) -> list[dict[str, Any]]:
    """Lines of steps, and a pause before the last one."""
    times = [began + step_s * step for step in range(1, count + 1)]
    times[-1] += pause_s
    return [
        {"step": step, "loss": 1.0, "step_seconds": step_s, "time": time} for step, time in enumerate(times, start=1)
    ]


@pytest.mark.parametrize(
    ("step_s", "pause_s", "age_s", "life"),
    [
        (1.0, 0.0, 9.0, "alive"),
        (1.0, 0.0, 11.0, "late"),  # ten times the median step
        (0.01, 0.0, 4.0, "alive"),  # five seconds at least
        (1.0, 0.0, 61.0, "silent"),  # a minute at least
        (1.0, 300.0, 400.0, "late"),  # it has paused for as long before: an evaluation, a save
        (1.0, 300.0, 610.0, "silent"),  # twice as long
        (60.0, 0.0, 590.0, "alive"),
        (60.0, 0.0, 610.0, "silent"),  # what is silent is late
    ],
)
def test_the_pace_of_a_run_says_when_it_is_late(step_s: float, pause_s: float, age_s: float, life: str) -> None:
    records = lines(50, step_s, pause_s)
    pulse = pulse_of(records, now=records[-1]["time"] + age_s, started=1000.0)
    assert (pulse.life, pulse.age_s, pulse.step_s) == (life, pytest.approx(age_s), step_s)


def test_a_start_may_take_its_time_and_pauses_between_starts_do_not_count() -> None:
    records = lines(50, 1.0)
    assert pulse_of(records, now=6000.0, started=5500.0).life == "alive"
    assert pulse_of(records, now=6200.0, started=5500.0).life == "silent"
    assert pulse_of([], now=6200.0, started=6190.0).step_s is None
    again = [*records, *lines(50, 1.0, began=5000.0)]
    assert pulse_of(again, now=5050.0 + 61, started=4990.0).life == "silent"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose steps took a second, and whose last line is four minutes old."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/run"
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text('[job]\nname = "run"\n[train]\nsteps = 100\n')
    (folder / "provenance.json").write_text("{}")
    now = time.time()
    text = "".join(json.dumps(line) + "\n" for line in lines(60, 1.0, began=now - 300))
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_a_silent_run_is_named_in_the_list_and_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with owned(run):
        os.utime(run / ".lock", (0, time.time() - 400))
        assert main(["runs"]) == 0
        assert not lacks(capsys.readouterr().out, "running", "4 min")
        assert main(["show", "runs/run"]) == 0
        assert not lacks(capsys.readouterr().out, "4 min", "twice")
        assert main(["runs", "--json"]) == 0
        [facts] = json.loads(capsys.readouterr().out)
        assert (facts["state"], facts["life"], facts["step_s"]) == ("running", "silent", 1.0)
        assert facts["last_line_s"] == pytest.approx(240, abs=5)
    assert main(["runs", "--json"]) == 0
    [facts] = json.loads(capsys.readouterr().out)
    assert (facts["life"], facts["last_line_s"]) == (None, None)  # nobody owns it: it is not silent, it has ended
