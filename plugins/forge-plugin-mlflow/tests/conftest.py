"""MLflow's own store and server, made once: its tables take seconds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from mlflow_store import database


@contextmanager
def serving(folder):
    """An `mlflow server` in a process of its own: its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", (folder / "server.log").open("w")
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", database(), "--artifacts-destination", str(folder / "files")]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # for evaluations of its own
    options = {"stdout": log, "stderr": subprocess.STDOUT, "env": environment, "start_new_session": True}
    with subprocess.Popen(command, **options) as process:
        try:
            _wait_for(url, process, folder / "server.log")
            yield url
        finally:
            process.terminate()


def _wait_for(url, process, log):
    until = time.monotonic() + 180
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise TimeoutError(log.read_text())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("mlflow-server")) as url:
        yield url


@pytest.fixture(autouse=True)
def no_server_of_the_user(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
