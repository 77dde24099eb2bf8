"""Runs as a server of Weights & Biases gets them from W&B's own client: online, and offline by `wandb sync`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import ExitCode, ForgeError
from forge_kit.tools.tracking import TrackedRun
from forge_plugin_wandb import Wandb
from forge_testing.refusals import naming

PNG = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x00\x00\x00\x00:~\x9bU\x00\x00\x00\n"
    b"IDATx\x9cc`\x00\x00\x00\x02\x00\x01H\xaf\xa4q\x00\x00\x00\x00IEND\xaeB`\x82"
)  # one pixel


class CrashesAt(TrainingHook):
    def __init__(self, step):
        self._step = step

    def on_step_end(self, context):
        if context.step == self._step:
            raise RuntimeError("crash")


class HandsOn(TrainingHook):
    def on_step_end(self, context):
        path = context.folder / "note.txt"
        path.write_text(f"after {context.step}")
        context.log_artifact(path)


class Stops(TrainingHook):
    def on_step_end(self, context):
        if context.step == 2:
            context.request_stop("time is over")


def points(server, run, name):
    return [(line["attempt"], line["step"], line[name]) for line in server.history[run] if name in line]


def test_a_run_that_crashes_and_continues_is_one_run(make_job, train, lines, server):
    keys = {
        "steps": 5,
        "eval": {"interval": 5},
        "checkpoint": {"interval": 2},
        "loggers": {
            "wandb": Wandb(base_url=server.url, tags=("a",), name="shown"),
            "another": Wandb(mode="offline", project="another"),
        },
    }
    with pytest.raises(RuntimeError, match="crash"):
        train(make_job(**keys), CrashesAt(4), HandsOn())
    [run] = server.runs
    assert server.exit_codes[run] == ExitCode.FAILED
    assert server.summaries[run]["forge/ended"] == "RuntimeError: crash"
    summary = train(make_job(**keys), HandsOn(), resume_with_changes=True)
    assert list(server.runs) == [run]
    assert server.exit_codes[run] == ExitCode.FINISHED
    losses = points(server, run, "train/loss")
    assert [(attempt, step) for attempt, step, _ in losses] == [(1, 1), (1, 2), (1, 3), (2, 3), (2, 4), (2, 5)]
    newest = {step: loss for _, step, loss in losses}
    assert list(newest.values()) == pytest.approx([record["loss"] for record in lines(summary)])
    assert points(server, run, "eval/loss") == [(2, 5, pytest.approx(summary.evaluation["eval/loss"]))]
    shown = server.runs[run]
    assert (shown["project"], shown["displayName"], shown["tags"]) == ("forge", "shown", ["a"])
    config = json.loads(shown["config"])
    assert config["train"]["value"]["steps"] == 5
    defined = [name for metric in config["_wandb"]["value"]["m"] for name in metric.values()]
    assert {"step", "*"} <= {name for name in defined if isinstance(name, str)}
    assert server.files[run, "handed-on/step-2/note.txt"] == b"after 2"
    assert server.files[run, "handed-on/step-5/note.txt"] == b"after 5"


def test_offline_runs_are_sent_by_wandb_sync(make_job, train, server):
    keys = {"steps": 4, "loggers": {"wandb": Wandb(mode="offline", interval=2)}}
    train(make_job(**keys), Stops())
    summary = train(make_job(**keys))
    assert not server.runs
    folders = sorted((summary.folder / "wandb").glob("offline-run-*"))
    command = [sys.executable, "-m", "wandb", "sync", "--yes", *map(str, folders)]
    environment = {**os.environ, "WANDB_BASE_URL": server.url}
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment, cwd=summary.folder)
    [run] = server.runs
    assert [(attempt, step) for attempt, step, _ in points(server, run, "train/loss")] == [(1, 2), (2, 4)]
    assert server.preempting == {run}


def test_offline_lines_that_a_killed_process_did_not_write_are_sent_when_it_continues(
    make_job, train, server, monkeypatch
):
    keys = {"steps": 6, "checkpoint": {"interval": 2}, "loggers": {"wandb": Wandb(mode="offline")}}
    with monkeypatch.context() as killed:
        killed.setattr(TrackedRun, "ended", lambda run: None)  # as of a process that is killed before it
        for _ in range(2):
            with pytest.raises(RuntimeError, match="crash"):
                train(make_job(**keys), CrashesAt(5))
    summary = train(make_job(**keys))
    folders = sorted((summary.folder / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime)
    command = [sys.executable, "-m", "wandb", "sync", "--yes", str(folders[-1])]
    environment = {**os.environ, "WANDB_BASE_URL": server.url}
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment, cwd=summary.folder)
    [run] = server.runs
    assert [(attempt, step) for attempt, step, _ in points(server, run, "train/loss")] == [(3, n) for n in range(1, 7)]


def test_counts_are_histograms_and_a_picture_is_shown(logger_context, server, tmp_path):
    logger = logger_context.build(Wandb(base_url=server.url, counts_interval=2))
    logger.start(0)
    for step in (1, 2):
        logger.log({"step": step, "loss": 1.0, "counts": {"moe/load": {"3": [1.0, 5.0]}}})
    picture = tmp_path / "curves.png"
    picture.write_bytes(PNG)
    logger.artifact(picture, "curves.png", 2)
    picture.unlink()
    logger.end(ExitCode.FINISHED, "")
    logger.close()
    [run] = server.runs
    [(_, step, histogram)] = points(server, run, "moe/load/3")
    assert (step, histogram["values"], histogram["bins"]) == (2, [1, 5], [0, 1, 2])
    [(_, step, shown)] = points(server, run, "files/curves.png")
    assert (step, shown["_type"]) == (2, "image-file")
    assert server.files[run, "handed-on/step-2/curves.png"] == PNG


def test_without_credentials_or_a_server_nothing_starts(make_job, train, monkeypatch):
    with pytest.raises(ForgeError, match=naming("https://api.wandb.ai", "`wandb login`")):
        train(make_job(steps=1, loggers={"wandb": Wandb()}))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ForgeError, match=naming("Weights & Biases", "1 s")):
            train(make_job(steps=1, job={"name": "silent"}, loggers={"wandb": Wandb(base_url=url, timeout_s=1)}))


def test_a_server_that_goes_away_does_not_hold_up_the_end(logger_context, server):
    logger = logger_context.build(Wandb(base_url=server.url, timeout_s=2))
    logger.start(0)
    server.__exit__()
    logger.log({"step": 1, "loss": 1.0})
    logger.end(ExitCode.FINISHED, "")
    with pytest.warns(UserWarning, match="`wandb sync .*` sends it"):  # after `timeout_s`; without it, never
        logger.close()
