"""Who owns a run folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from forge_core.checkpoint.run_folder import owned
from forge_core.contracts.errors import ForgeError
from forge_testing.processes import HANG_S

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


def test_a_folder_has_one_owner_at_a_time(tmp_path):
    with owned(tmp_path), pytest.raises(ForgeError, match=f"is in use by process {os.getpid()} on "), owned(tmp_path):
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
