"""A save may die before any of its operations on files: one process dies at each."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from itertools import count

import pytest
import torch

from forge_core.checkpoint.manager import Checkpoints, Retention, State
from forge_core.checkpoint.storage import LocalStorage
from forge_core.parallel.mesh import leave_group
from forge_testing.processes import exit_code_of_fork

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
"""Audit events of operations that change a file system; opening a file to write is another."""
DEAD = 9


def checkpoints(folder):
    return Checkpoints(LocalStorage(folder), Retention(keep=2), "full")


def save(folder, step):
    tensors = {"weight": torch.full((3,), float(step)), "count": torch.tensor(step)}
    checkpoints(folder).save(step, State(tensors, {"progress": {"step": step}}))


def save_and_die(folder, step, operation):
    """Die before that operation, counted from 1."""
    numbers = count(1)

    def audit(event, arguments):
        changes = event in CHANGES or (event == "open" and "w" in str(arguments[1]))
        if changes and next(numbers) == operation:
            os._exit(DEAD)

    sys.addaudithook(audit)
    save(folder, step)
    os._exit(0)


@pytest.fixture
def ready_to_fork():
    """Without a group of an earlier test: no thread of it survives a fork, and a collective would wait for one."""
    leave_group()
    gc.collect()
    gc.freeze()  # nothing of it is garbage for the forks, which would copy each page that they look through


@pytest.mark.filterwarnings("error:passing over")
@pytest.mark.parametrize("step", [3, 2], ids=["a new step", "a step that is there"])
def test_a_save_that_dies_leaves_the_one_before_or_itself_whole(tmp_path, step, ready_to_fork):
    before, folder = tmp_path / "before", tmp_path / "now"
    save(before, 1)
    save(before, 2)
    deaths = 0
    for operation in count(1):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)
        if exit_code_of_fork(save_and_die, folder, step, operation) != DEAD:
            break
        deaths += 1
        path, manifest = checkpoints(folder).newest()
        assert path.name == f"step-{manifest['step']}"
        assert manifest["step"] in (step - 1, step)
        save(folder, 4)
        assert sorted(left.name for left in folder.iterdir()) == [path.name, "step-4"]
    assert deaths > 5
