"""A small job, something that goes wrong in one of its ranks, and `forge-run` as a user starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_testing import TINY_JOB

JOB = f"""
[job]
name = "tiny"
{TINY_JOB.replace("steps = 4", "steps = 6")}
[checkpoint]
interval = 2
"""

TROUBLE = '''
import atexit
import os
import signal
import threading
import time
from pathlib import Path

import torch
from attrs import define
from forge_core import TrainingHook, report_progress
from forge_core.checkpoint import tensors


@define(kw_only=True, slots=False)
class Trouble(TrainingHook):
    """What goes wrong in one rank at the start of one step (0: after the last), only once; a step takes `pause_s`."""

    rank: int = 1
    step: int = 3
    what: str = ""
    pause_s: float = 0.0

    def on_step_begin(self, context):
        if os.environ["RANK"] == "0":
            print("begin", context.step, flush=True)
        time.sleep(self.pause_s)
        if self.what and context.step == self.step and os.environ["RANK"] == str(self.rank):
            if not os.path.exists("went-wrong"):
                self.go_wrong()

    def on_train_end(self, context):
        if self.step == 0 and os.environ["RANK"] == str(self.rank):
            self.go_wrong()

    def go_wrong(self):
        open("went-wrong", "w").close()
        if self.what == "raise":
            raise ValueError("the flux is out of bounds")
        if self.what == "hang":
            time.sleep(3600)
        if self.what == "leave":
            os._exit(7)
        if self.what == "work":
            for number in range(70):
                report_progress(f"{number} of 70 files")
                time.sleep(0.3)
            return
        if self.what == "slow save":
            bytes_of = tensors.bytes_of
            tensors.bytes_of = lambda tensor: (time.sleep(1.2), bytes_of(tensor))[1]
            return
        if self.what == "linger":
            atexit.register(Path("took-leave").touch)
            threading.Thread(target=self.stay_in_torch, daemon=True).start()
            return
        os.kill(os.getpid(), getattr(signal, self.what))

    def stay_in_torch(self):
        while True:
            torch.ones(64, 64) @ torch.ones(64, 64)
'''

LATE = re.compile(r"^warning: waiting for rank .*\n", re.MULTILINE)
"""What ranks say on standard error when another one starts five seconds later, as happens on a busy machine."""
TIME_LIMIT_S = 600
"""After which a process is taken to hang. Nothing here takes as long, however busy the machine is."""


class Job:
    """A job in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "runs/tiny"
        self._started: list[subprocess.Popen] = []

    def start(
        self, *arguments: str, launcher: tuple[str, ...] = (), command: tuple[str, ...] = (), **environment: str
    ) -> subprocess.Popen:
        """`forge-run [COMMAND] job.toml` with these arguments, as a process group of its own."""
        words = [*(launcher or (sys.executable,)), "-m", "forge_core", *command, "job.toml", *arguments]
        variables = os.environ | {"OMP_NUM_THREADS": "1", "FORGE_CACHE": str(self.folder / "cache")} | environment
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            words, cwd=self.folder, env=variables, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        self._started.append(process)
        return process

    def finish(self, process: subprocess.Popen) -> tuple[int, str, str]:
        """Exit code, standard output and standard error, once it has ended."""
        out, err = process.communicate(timeout=TIME_LIMIT_S)
        return process.returncode, out, LATE.sub("", err)

    def trouble(self, what: str = "", **fields: object) -> list[str]:
        """Overrides that add the hook `Trouble`."""
        settings = {"type": "./trouble.py:Trouble", "what": what, **fields}
        return [f"--hooks.trouble.{name}={value}" for name, value in settings.items()]

    def steps_saved(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in (self.run / "checkpoints").glob("step-*"))

    def log(self, rank: int) -> str:
        return (self.run / f"logs/rank-{rank}.log").read_text()

    def stop(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "trouble.py").write_text(TROUBLE)
    job = Job(tmp_path)
    yield job
    job.stop()


def wait_for_step(process: subprocess.Popen, step: int) -> None:
    """Until rank 0 has begun a step."""
    deadline = time.monotonic() + TIME_LIMIT_S
    for line in process.stdout:
        if line.startswith("begin ") and int(line.split()[1]) >= step:
            return
        assert time.monotonic() < deadline
    raise AssertionError(process.stderr.read())


def children(process: subprocess.Popen) -> list[int]:
    """The ranks that a launcher has started, in order."""
    return [int(number) for number in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def alive(number: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds: float = TIME_LIMIT_S) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
