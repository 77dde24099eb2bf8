"""The run folder: who owns it, and what becomes of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from forge_core.checkpoint.run_folder import LOCK, owned, owner
from forge_core.contracts.components import DatasetComponent
from forge_core.contracts.errors import ForgeError


class Absent(DatasetComponent):
    """Finds out only when it is built that its data is not there."""

    def build(self, context):
        raise ForgeError("no data")


def test_a_folder_has_one_owner_who_is_named(tmp_path):
    with owned(tmp_path):
        assert owner(tmp_path).startswith(f"process {os.getpid()} on ")
        with (
            pytest.raises(ForgeError, match=rf"is in use by process {os.getpid()} on .*; ask first"),
            owned(tmp_path, "ask first"),
        ):
            pass
    assert owner(tmp_path) == ""


def test_asking_who_owns_a_folder_never_keeps_a_run_from_it(tmp_path):
    (tmp_path / LOCK).touch()
    hold = "f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_SH); print(flush=True); time.sleep(0.1)"
    with subprocess.Popen(
        [sys.executable, "-c", f"import fcntl, sys, time; {hold}", str(tmp_path / LOCK)], stdout=subprocess.PIPE
    ) as asking:
        asking.stdout.readline()
        with owned(tmp_path):
            pass


def test_a_folder_in_which_nothing_came_to_be_is_removed(tmp_path):
    with owned(tmp_path / "runs/new"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays(tmp_path):
    with owned(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_run_that_cannot_be_built_leaves_nothing(make_job, train, tmp_path):
    with pytest.raises(ForgeError, match="no data"):
        train(make_job(job={"output": str(tmp_path / "runs")}, data={"sources": (Absent(),)}))
    assert list(tmp_path.iterdir()) == []
