"""The final loss of a run is the same number wherever it is shown."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

from forge_core import Trainer, read_metrics
from forge_core.cli import main
from forge_plugin_runs.curves import panels
from forge_plugin_runs.final_loss import mean_of_last
from forge_testing.tiny import TINY_JOB

STEPS = 60
JOB = TINY_JOB.replace("steps = 4", f"steps = {STEPS}") + "[loggers.curves]\n"


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What a run and each command show of a run, by name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    headings: list[str] = []
    write = panels.write_figure

    def keep_heading(figure, *rest):
        headings.append(figure.texts[1].get_text())
        write(figure, *rest)

    monkeypatch.setattr(panels, "write_figure", keep_heading)
    Path("job.toml").write_text(JOB)
    commands = {
        "log": "job.toml",
        "runs": "runs",
        "show": "show runs/run",
        "watch": "watch --once runs/run",
        "compare": "compare runs/run",
        "compare --json": "compare runs/run --json",
        "runs --json": "runs --json",
        "show --json": "show runs/run --json",
    }
    texts = {}
    for name, command in commands.items():
        assert main(command.split()) == 0
        texts[name] = capsys.readouterr().out
    assert main(["report", "runs/run", "--format", "md", "--out", "report.md"]) == 0
    return {**texts, "report": Path("report.md").read_text(), "picture": headings[-1]}


def test_every_command_and_picture_shows_the_training_loss_of_the_last_step(shown: dict[str, str]) -> None:
    losses = read_metrics("runs/run").column("loss")[1].tolist()
    last, mean = losses[-1], statistics.fmean(losses[-STEPS // 20 :])
    assert f"{last:.4f}" != f"{mean:.4f}"
    patterns = {
        "log": rf"finished at step {STEPS}: loss ([\d.]+)",
        "picture": r"tokens   ·   loss ([\d.]+)",
        "runs": rf"{STEPS} of {STEPS} +([\d.]+)",
        "show": r"last step\n.*\n  loss +([\d.]+)",
        "watch": r"│ loss ([\d.]+)",
        "compare": r"\| run \| [\d.]+ \| best \| ([\d.]+) \|",
        "report": r"\| training loss \| ([\d.]+) ",
    }
    found = {name: re.findall(pattern, shown[name]) for name, pattern in patterns.items()}
    assert found == {name: [f"{last:.4f}"] for name in patterns}
    [listed], [row] = json.loads(shown["runs --json"]), json.loads(shown["compare --json"])["rows"]
    described = json.loads(shown["show --json"])
    assert [listed["loss"], row["loss"], described["loss"], described["metrics"]["loss"]] == [last] * 4


def test_a_mean_over_the_last_steps_is_labelled_so(shown: dict[str, str]) -> None:
    mean = statistics.fmean(read_metrics("runs/run").column("loss")[1].tolist()[-STEPS // 20 :])
    head, _, row = shown["compare"].splitlines()[-3:]
    assert dict(zip(head.split(" | "), row.split(" | "), strict=True))["mean loss, last 5 %"] == f"{mean:.4f}"
    assert f"(mean of the last {STEPS // 20} steps {mean:.4f})" in shown["report"]
    assert json.loads(shown["compare --json"])["rows"][0]["mean_loss"] == pytest.approx(mean)


def test_python_returns_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    summary = Trainer(TINY_JOB).run()
    assert summary.loss == read_metrics(summary.folder)[-1]["loss"]


def test_the_mean_is_over_one_step_at_least() -> None:
    assert mean_of_last([3.0, 1.0]) == 1.0
    assert mean_of_last([*[9.0] * 38, 1.0, 2.0]) == 1.5
