"""Drills of the tiny job, as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge_testing import TINY_JOB

JOB = '[job]\nname = "tiny"\n' + TINY_JOB.replace("steps = 4", "steps = 500")

HOOKS = '''
import os
import time

import torch
from attrs import define

from forge_core import Plugin, TrainingHook, hookimpl


@define(kw_only=True, slots=False)
class Forgetful(TrainingHook):
    """Throws the optimizer's state away when a run continues, as if checkpoints did not hold it."""

    def on_train_begin(self, context):
        if context.step:
            context.optimizer.state.clear()


@define(kw_only=True, slots=False)
class Trembling(TrainingHook):
    """Adds noise that no seed decides: enough that the losses of no two runs are equal by chance."""

    def on_gradients(self, context):
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
        for parameter in context.model.parameters():
            parameter.grad *= 1 + 1e-4 * torch.rand(parameter.grad.shape, generator=generator)


@define(kw_only=True, slots=False)
class Stubborn(TrainingHook):
    """Forgets every request to stop."""

    def on_step_end(self, context):
        if context.requests.stop and not context.requests.final:
            time.sleep(0.5)  # a signal is delivered by its handler and by a thread, which may be late
            context.requests.stop = ""


@define(kw_only=True, slots=False)
class SlowSaves(Plugin):
    """Saves in the background begin late: the next steps of so small a job are over by then."""

    @hookimpl(wrapper=True)
    def forge_build_storage(self):
        storage = yield
        cls, begin = type(storage), type(storage).begin

        def beginning(own, step):
            time.sleep(0.5)
            return begin(own, step)

        cls.begin = beginning
        return storage


@define(kw_only=True, slots=False)
class Failing(TrainingHook):
    def on_step_end(self, context):
        raise ValueError("of its own")
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the tiny job. It is not the current one: only processes of a drill in it are there."""
    for name, value in {"FORGE_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "hooks.py").write_text(HOOKS)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start `forge-run doctor drill` with arguments."""

    def starting(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "forge_core", "doctor", "drill", "job.toml", *arguments]
        return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return starting


@pytest.fixture
def drill(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """The exit code of a drill, and its JSON."""

    def drilling(*arguments: str) -> tuple[int, dict[str, Any]]:
        process = start("--json", *arguments)
        output, errors = process.communicate()
        assert output, errors
        return process.returncode, json.loads(output)

    return drilling


@pytest.fixture
def processes(folder: Path) -> Callable[[], list[str]]:
    """The processes of drills: whatever runs in their folder."""

    def running() -> list[str]:
        return [path.parent.name for path in Path("/proc").glob("[0-9]*/cwd") if _place(path) == str(folder)]

    return running


def _place(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # the process has ended, or is somebody else's
        return ""
