"""The batch script around srun, for which a stand-in is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from forge_core.checkpoint.run_folder import RunFolder
from forge_core.contracts.run_end import Cause, End
from forge_plugin_launch.slurm import attempt
from forge_plugin_launch.slurm.attempt import BatchStep
from forge_plugin_launch.slurm.records import FOLDER, PROGRESS, SlurmAttempt, write_json
from forge_testing.refusals import lacks

SRUN = """
import signal, sys, time
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(time.monotonic()))
while len(asked) < 2 or asked[-1] - asked[-2] > 1:
    time.sleep(0.01)
sys.exit(137)
"""


def test_tasks_that_stay_after_another_has_failed_are_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """srun --wait=0 would wait for a frozen one until the time limit. srun ends its tasks at two SIGINT in a second."""
    monkeypatch.setattr(attempt, "LOOK_S", 0.2)
    monkeypatch.setattr(attempt, "LATE_S", 0.5)
    assert BatchStep().run([sys.executable, "-c", SRUN], lambda: True) == 137
    assert not lacks(capsys.readouterr().err, "0.5 s")


def test_tasks_of_which_none_has_failed_may_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "LOOK_S", 0.1)
    monkeypatch.setattr(attempt, "LATE_S", 0.2)
    assert BatchStep().run([sys.executable, "-c", "import time; time.sleep(1)"], lambda: False) == 0


@pytest.mark.parametrize(("saved", "restart", "trained"), [(60, 1, True), (55, 1, False), (60, 0, False)])
def test_a_run_is_trained_when_this_attempt_has_saved_the_last_step(
    tmp_path: Path, saved: int, restart: int, trained: bool
) -> None:
    (tmp_path / FOLDER).mkdir()
    facts = {"job": "17", "restart": restart, "began": 0, "saved": saved, "steps": 60}
    write_json(tmp_path / FOLDER / PROGRESS, facts)
    assert attempt._trained(tmp_path, SlurmAttempt(job="17", restart=1, began=0.0)) == trained


@pytest.mark.parametrize(
    ("name", "ended", "counts"), [("17.1", 5.0, True), ("17.0", 20.0, False), ("", 20.0, True), ("", 5.0, False)]
)
def test_the_end_of_an_earlier_attempt_is_none_of_this_one(
    tmp_path: Path, name: str, ended: float, counts: bool
) -> None:
    end = End(code=0, cause=Cause.FINISHED, attempt=name, ended=ended)
    RunFolder(tmp_path).write_end(end)
    assert (attempt._end_of(tmp_path, SlurmAttempt(job="17", restart=1, began=10.0)) == end) == counts


def test_an_attempt_whose_node_died_gets_its_line_at_the_next_one(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    environment = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "gpu[01-02]"}
    begun = attempt.begin(tmp_path, environment, None)
    [ended] = attempt.close_unfinished(tmp_path)
    assert (ended.job, ended.nodes, ended.began) == ("17", "gpu[01-02]", begun.began)
    assert (ended.kind, ended.action, ended.code) == ("node", "queued again", None)
    assert attempt.close_unfinished(tmp_path) == [ended]
