"""Runs as trackio shows them: from its SQLite files, and from a server of its own."""

from __future__ import annotations

import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import ExitCode, ForgeError
from forge_core.engine.build import build_context
from forge_plugin_trackio import Trackio
from forge_testing.refusals import naming, refuses


@pytest.fixture
def project():
    return f"p-{uuid4().hex[:8]}"


@pytest.fixture
def storage():
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage


class Crash(TrainingHook):
    def on_step_end(self, context):
        if context.step == 4:
            raise RuntimeError("crash")


class HandsOn(TrainingHook):
    def on_train_end(self, context):
        path = context.folder / "note.txt"
        path.write_text(f"after {context.step}")
        context.log_artifact(path)
        path.write_text("changed")


def test_a_run_that_crashes_and_continues_is_one_run(make_job, train, lines, storage, project):
    keys = {
        "steps": 5,
        "eval": {"interval": 5},
        "checkpoint": {"interval": 2},
        "loggers": {"trackio": Trackio(project=project, tags=("a",), name="shown")},
    }
    with pytest.raises(RuntimeError, match="crash"):
        train(make_job(**keys), Crash())
    [run] = storage.get_runs(project)
    assert run.startswith("shown-")
    summary = train(make_job(**keys), HandsOn())
    assert storage.get_runs(project) == [run]
    logs = storage.get_logs(project, run)
    losses = [(log["attempt"], log["step"], log["train/loss"]) for log in logs if "train/loss" in log]
    assert [(attempt, step) for attempt, step, _ in losses] == [(1, 1), (1, 2), (1, 3), (2, 3), (2, 4), (2, 5)]
    newest = {step: loss for _, step, loss in losses}
    assert list(newest.values()) == pytest.approx([record["loss"] for record in lines(summary)])
    [score] = [log["eval/loss"] for log in logs if "eval/loss" in log]
    assert score == pytest.approx(summary.evaluation["eval/loss"])
    config = storage.get_run_config(project, run)
    assert (config["train"]["steps"], config["tags"]) == (5, ["a"])
    [alert] = storage.get_alerts(project)
    assert (alert["level"], alert["text"]) == ("error", "RuntimeError: crash")
    assert "after 5" in _texts(storage)


def _texts(storage):
    """Contents of the short files that trackio keeps, which it names by their SHA-256."""
    import trackio

    paths = Path(trackio.utils.TRACKIO_DIR).rglob("*")
    return [path.read_text() for path in paths if path.is_file() and path.stat().st_size == len("after 5")]


SERVER = """
import sys, trackio
trackio.show(project="p", open_browser=False, block_thread=False)
sys.stdin.read()
"""


@pytest.fixture
def server(tmp_path):
    """A server of trackio with files of its own: its address with the token, and its folder."""
    folder = tmp_path / "server"
    environment = {**os.environ, "TRACKIO_DIR": str(folder), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", SERVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        lines = iter(process.stdout.readline, "")
        url = next(match[0] for line in lines if (match := re.search(r"http://\S+write_token=[\w-]+", line)))
        yield url, folder
        process.kill()


def test_a_run_goes_to_a_server_of_ones_own(make_job, train, server, project):
    url, folder = server
    train(make_job(steps=3, loggers={"trackio": Trackio(project=project, server_url=url)}))
    [database] = folder.glob(f"{project}*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by step").fetchall()
    assert [step for step, metrics in rows if "train/loss" in json.loads(metrics)] == [1, 2, 3]


def test_a_server_that_does_not_answer_is_refused(make_job, train):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    url = f"http://127.0.0.1:{port}/?write_token=secret"
    message = rf"trackio server http://127\.0\.0\.1:{port}/ does not answer: .*refused"
    with pytest.raises(ForgeError, match=message) as caught:
        train(make_job(steps=1, loggers={"trackio": Trackio(server_url=url)}))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "key", "facts"),
    [
        ({"server_url": "http://a", "space_id": "a/b"}, "space_id", ["server_url"]),
        ({"server_url": "127.0.0.1:7860"}, "server_url", ["'127.0.0.1:7860'", "http://"]),
    ],
)
def test_a_wrong_table_is_refused_when_the_job_is_checked(make_job, train, keys, key, facts):
    with refuses(f"loggers.trackio.{key}", *facts):
        train(make_job(steps=1, loggers={"trackio": Trackio(**keys)}))


def test_another_folder_than_that_of_the_process_is_refused(make_job, train, storage, tmp_path):
    with pytest.raises(ForgeError, match=naming("elsewhere", "TRACKIO_DIR")):
        train(make_job(steps=1, loggers={"trackio": Trackio(folder=str(tmp_path / "elsewhere"))}))


def test_a_run_that_trackio_does_not_take_ends_before_the_first_step(make_job, train, monkeypatch, project):
    import trackio

    def refuse(*_, **__):
        raise PermissionError("no space of that name")

    monkeypatch.setattr(trackio, "init", refuse)
    with pytest.raises(ForgeError, match=naming("trackio", "no space of that name")):
        train(make_job(steps=1, loggers={"trackio": Trackio(project=project)}))


def test_counts_are_histograms(make_job, catalog, tmp_path, storage, project):
    logger = build_context(make_job(), catalog, tmp_path).build(Trackio(project=project, counts_interval=2))
    logger.start(0)
    for step in (1, 2):
        logger.log({"step": step, "loss": 1.0, "counts": {"moe/load": {"3": [1.0, 5.0]}}})
    logger.end(ExitCode.STOPPED, "time is over")
    logger.close()
    [run] = storage.get_runs(project)
    logs = storage.get_logs(project, run)
    [(step, counts)] = [(log["step"], log["moe/load/3"]) for log in logs if "moe/load/3" in log]
    assert (step, counts["values"], counts["bins"]) == (2, [1, 5], [0, 1, 2])
    [alert] = storage.get_alerts(project)
    assert (alert["level"], alert["text"]) == ("info", "time is over")
