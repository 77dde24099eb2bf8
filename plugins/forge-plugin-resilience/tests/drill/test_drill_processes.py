"""No process of a run outlives its drill."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from forge_plugin_resilience.drill import run_process
from forge_plugin_resilience.drill.run_process import RunProcess

pytestmark = pytest.mark.slow


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "is_real"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_an_interrupted_drill_leaves_no_process_behind(number, is_real, start, folder, processes, monkeypatch):
    if is_real:
        monkeypatch.setenv("FORGE_TESTS_REAL_STARTS", "1")
    process = start("--nproc=2", "--only=frozen-1")
    frozen = folder / "runs" / "tiny.drill" / "frozen-1" / "injected.json"
    until = time.monotonic() + 300
    while not frozen.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert frozen.exists()
    assert len(processes()) == 4  # the drill, the launcher and two ranks, one of which stands still
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert not processes()
    assert not (folder / "runs" / "tiny.drill").exists()


DAEMON = '''
import subprocess, sys

from attrs import define

from forge_core import TrainingHook


@define(kw_only=True, slots=False)
class Daemon(TrainingHook):
    """Starts a process that outlives its parent, in a session and with an environment that say nothing of the run."""

    def on_train_begin(self, context):
        subprocess.run(["sh", "-c", "setsid sleep 600 &"], env={"PATH": "/usr/bin:/bin"}, check=True)
'''


def test_a_process_that_has_left_its_run_is_found_and_killed(folder, processes, monkeypatch):
    # The repository's tests fork processes of one that starts with the first of them: before the attempt, not in it
    subprocess.run([sys.executable, "-m", "forge_core", "--help"], capture_output=True, check=True)
    monkeypatch.setattr(run_process, "GONE_S", 1.0)
    monkeypatch.chdir(folder)
    (folder / "daemon.py").write_text(DAEMON)
    with (folder / "job.toml").open("a") as job:
        job.write('\n[hooks.daemon]\ntype = "./daemon.py:Daemon"\n')
    with RunProcess([folder / "job.toml"], 1, folder / "log.txt") as run:
        run.wait(lambda: time.time() + 300, lambda: None)
    monkeypatch.undo()
    assert run.code == 0, run.log.read_text()
    assert len(run.left) == 1
    assert not processes()
