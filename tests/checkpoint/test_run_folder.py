"""The run folder: who owns it, and what becomes of it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys

import pytest

from forge_core.checkpoint.run_folder import LOCK, owned, storage_of
from forge_core.config.load import parse_job
from forge_core.contracts.components import DatasetComponent, TrainingHook
from forge_core.contracts.errors import ForgeError, JobError
from forge_kit.tools.run_owner import owner
from forge_testing.processes import HANG_S
from forge_testing.refusals import naming

KILLED_WITH_A_WORKER = """
import os, signal, sys, time
from pathlib import Path

from forge_core.checkpoint.run_folder import owned

with owned(Path(sys.argv[1])):
    worker = os.fork()
    if not worker:
        time.sleep(3600)
        os._exit(0)
    print(worker, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Absent(DatasetComponent):
    """Finds out only when it is built that its data is not there."""

    def build(self, context):
        raise ForgeError("no data")


def test_a_folder_has_one_owner_who_is_named(tmp_path):
    with owned(tmp_path):
        assert owner(tmp_path).startswith(f"process {os.getpid()} on ")
        with (
            pytest.raises(ForgeError, match=naming(tmp_path, f"process {os.getpid()} on ", "ask first")),
            owned(tmp_path, "ask first"),
        ):
            pass
    assert owner(tmp_path) == ""


def test_where_locks_cannot_be_asked_for_a_run_counts_as_owned_and_the_reason_is_named(tmp_path, monkeypatch):
    def refuse(lock, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    (tmp_path / LOCK).touch()
    monkeypatch.setattr("forge_kit.tools.run_owner.fcntl.flock", refuse)
    assert os.strerror(errno.ENOLCK) in owner(tmp_path)


def test_asking_who_owns_a_folder_never_keeps_a_run_from_it(tmp_path):
    (tmp_path / LOCK).touch()
    hold = "f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_SH); print(flush=True); time.sleep(0.1)"
    with subprocess.Popen(
        [sys.executable, "-c", f"import fcntl, sys, time; {hold}", str(tmp_path / LOCK)], stdout=subprocess.PIPE
    ) as asking:
        asking.stdout.readline()
        with owned(tmp_path):
            pass


def test_the_lock_of_a_host_that_died_is_waited_for(tmp_path):
    """A network file system keeps it for a while, and a scheduler starts the run again on another host."""
    (tmp_path / LOCK).write_text("process 7 on a-host-that-died\n")
    hold = "f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); time.sleep(1)"
    with subprocess.Popen(
        [sys.executable, "-c", f"import fcntl, sys, time; {hold}", str(tmp_path / LOCK)], stdout=subprocess.PIPE
    ) as lease:
        lease.stdout.readline()
        with pytest.raises(ForgeError, match=naming(tmp_path, "process 7 on a-host-that-died")), owned(tmp_path):
            pass
        with owned(tmp_path, patience_s=60):
            assert owner(tmp_path).startswith(f"process {os.getpid()} on ")
            assert lease.wait(timeout=60) == 0


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


def test_a_folder_has_one_owner_at_a_time(tmp_path):
    with (
        owned(tmp_path),
        pytest.raises(ForgeError, match=naming(tmp_path, f"process {os.getpid()} on ")),
        owned(tmp_path),
    ):
        pass
    with owned(tmp_path):
        pass


def test_a_worker_that_outlives_a_killed_run_does_not_keep_the_folder(tmp_path):
    command = [sys.executable, "-c", KILLED_WITH_A_WORKER, str(tmp_path)]
    killed = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    worker = int(killed.stdout.readline())
    try:
        assert killed.wait(timeout=HANG_S) == -signal.SIGKILL
        os.kill(worker, 0)  # lives
        with owned(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


class Displaces(TrainingHook):
    """Somebody moves the run folder after a step, or removes it, or starts another run there."""

    def __init__(self, how, step):
        self.how, self.step = how, step

    def on_step_end(self, context):
        if context.step != self.step:
            return
        if self.how == "removed":
            shutil.rmtree(context.folder)
            return
        context.folder.rename(context.folder.with_name("moved"))
        if self.how == "taken over":
            context.folder.mkdir()
            (context.folder / LOCK).write_text("process 7 on another-host\n")


@pytest.mark.parametrize("how", ["moved", "removed", "taken over"])
@pytest.mark.parametrize("step", [3, 6])
def test_a_run_whose_folder_was_displaced_ends_at_its_next_save(make_job, train, tmp_path, how, step):
    job = make_job(steps=6, job={"output": str(tmp_path / "runs"), "name": "run"}, checkpoint={"interval": 2})
    folder = tmp_path / "runs/run"
    with pytest.raises(ForgeError, match=naming(folder, f"step {4 if step == 3 else 6}")) as failure:
        train(job, Displaces(how, step))
    assert ("another run" in str(failure.value)) == (how == "taken over")
    assert folder.exists() == (how == "taken over")
    if folder.exists():
        assert [path.name for path in folder.iterdir()] == [LOCK]
        assert (folder / LOCK).read_text() == "process 7 on another-host\n"
    if how != "removed":
        assert (tmp_path / "runs/moved/checkpoints/step-2/manifest.json").exists()


def test_a_damaged_job_in_a_run_folder_is_named_with_its_line(tmp_path):
    (tmp_path / "job.toml").write_text('[job]\nname = "a')
    for read in (storage_of, lambda folder: parse_job((folder / "job.toml").read_text(), str(folder / "job.toml"))):
        with pytest.raises(JobError, match=naming(tmp_path / "job.toml")):
            read(tmp_path)
