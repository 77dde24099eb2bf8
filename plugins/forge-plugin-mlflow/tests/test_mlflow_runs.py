"""Runs as MLflow has them: on its own server over HTTP, and in a SQLite file."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from uuid import uuid4

import pytest
from attrs import evolve
from mlflow_store import client_of, database

from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import ForgeError
from forge_core.engine.build import build_context
from forge_plugin_mlflow import MLflow
from forge_plugin_mlflow.outbox import Outbox
from forge_testing.refusals import lacks, naming, refuses


@pytest.fixture
def project():
    return f"p-{uuid4().hex[:8]}"


class Crash(TrainingHook):
    def on_step_end(self, context):
        if context.step == 4:
            raise RuntimeError("crash")


class Stops(TrainingHook):
    def on_step_end(self, context):
        if context.step == 2:
            context.request_stop("time is over")


class HandsOn(TrainingHook):
    def on_train_end(self, context):
        path = context.folder / "note.txt"
        path.write_text(f"after {context.step}")
        context.log_artifact(path)
        path.unlink()


def runs_of(client, project):
    return client.search_runs([client.get_experiment_by_name(project).experiment_id])


def test_a_run_that_crashes_and_continues_is_one_run(make_job, train, lines, server, project, tmp_path):
    table = MLflow(project=project, tracking_uri=server, tags=("team=vision", "baseline"), name="shown")
    keys = {"steps": 5, "eval": {"interval": 5}, "checkpoint": {"interval": 2}, "loggers": {"mlflow": table}}
    client = client_of(server)
    with pytest.raises(RuntimeError, match="crash"):
        train(make_job(**keys), Crash())
    [run] = runs_of(client, project)
    assert (run.info.status, run.data.tags["forge.ended"]) == ("FAILED", "RuntimeError: crash")
    summary = train(make_job(**keys), HandsOn())
    [again] = runs_of(client, project)
    assert (again.info.run_id, again.info.status, again.info.run_name) == (run.info.run_id, "FINISHED", "shown")
    tags = again.data.tags
    assert (tags["team"], tags["baseline"], tags["forge.starts"]) == ("vision", "true", "0, 2")
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(point.step for point in losses) == [1, 2, 3, 3, 4, 5]
    newest = {point.step: point.value for point in sorted(losses, key=lambda point: point.timestamp)}
    assert [newest[step] for step in range(1, 6)] == pytest.approx([record["loss"] for record in lines(summary)])
    assert again.data.metrics["eval/loss"] == pytest.approx(summary.evaluation["eval/loss"])
    assert again.data.params["train.steps"] == "5"
    files = client.list_artifacts(run.info.run_id)
    assert {file.path for file in files} == {"job.toml", "step-5"}
    note = client.download_artifacts(run.info.run_id, "step-5/note.txt", str(tmp_path))
    assert Path(note).read_text() == "after 5"
    assert not (summary.folder / "mlflow-unsent.jsonl").exists()


def test_a_sqlite_file_and_a_run_that_is_to_be_continued(make_job, train, project):
    uri = database()
    job = make_job(steps=4, loggers={"mlflow": MLflow(project=project, tracking_uri=uri, interval=2)})
    train(job, Stops())
    client = client_of(uri)
    # Beside the run folders and not among them: a database has no place for files
    assert client.get_experiment_by_name(project).artifact_location == Path(job.job.output, "mlflow-files").as_uri()
    [run] = runs_of(client, project)
    assert (run.info.status, run.data.tags["forge.ended"]) == ("SCHEDULED", "time is over")
    assert [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")] == [2]


def test_counts_are_files(make_job, catalog, tmp_path, project):
    table = MLflow(project=project, tracking_uri=database(), counts_interval=2)
    logger = build_context(make_job(), catalog, tmp_path).build(table)
    logger.start(0)
    for step in (1, 2):
        logger.log({"step": step, "loss": 1.0, "counts": {"moe/load": {"3": [1.0, 5.0]}}})
    logger.close()
    client = client_of(database())
    [run] = runs_of(client, project)
    [file] = client.list_artifacts(run.info.run_id, "counts")
    text = Path(client.download_artifacts(run.info.run_id, file.path, str(tmp_path))).read_text()
    assert (file.path, json.loads(text)) == ("counts/step-2.json", {"moe/load": {"3": [1.0, 5.0]}})


def test_lines_wait_for_a_server_and_are_sent_when_the_run_continues(
    make_job, catalog, tmp_path, project, monkeypatch, recwarn
):
    context, client = build_context(make_job(), catalog, tmp_path), client_of(database())
    table = MLflow(project=project, tracking_uri=database(), timeout_s=1.5)
    logger = context.build(table)
    logger.start(0)
    tries = []

    def away(*_, **__):
        tries.append(1)
        raise OSError(f"it is away, {len(tries)}")  # Python itself shows equal warnings once

    path = tmp_path / "note.txt"
    path.write_text("text")
    with monkeypatch.context() as patch:
        patch.setattr("mlflow.tracking.MlflowClient.log_batch", away)
        for step in (1, 2, 3):
            logger.log({"step": step, "loss": float(step)})
        logger.artifact(path, "note.txt", 2)
        logger.flush()
        saved = (tmp_path / "mlflow-unsent.jsonl").read_text().splitlines()
        assert [json.loads(line).get("step") for line in saved] == [1, 2, 3, None]
        logger.close()
    messages = [str(warning.message) for warning in recwarn]
    assert len(tries) > 1
    assert len([text for text in messages if not lacks(text, "it is away, 1")]) == 1
    assert not any("it is away, 2" in text for text in messages)
    assert any(not lacks(text, "5 deliveries") for text in messages)
    again = context.build(evolve(table, timeout_s=60.0))  # the server answers now, though perhaps slowly
    again.start(2)  # a checkpoint of step 2: line 3 is made again
    again.log({"step": 3, "loss": 30.0})
    again.end(0, "")
    again.close()
    [run] = runs_of(client, project)
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [file.path for file in client.list_artifacts(run.info.run_id, "step-2")] == ["step-2/note.txt"]
    assert run.info.status == "FINISHED"
    assert not list(tmp_path.glob("mlflow-unsent*"))


def test_an_outbox_tries_again_in_order_and_what_it_holds_outlives_the_process(tmp_path, recwarn):
    sent, away = [], True

    def deliver(items):
        if away:
            raise OSError("away")
        sent.extend(item["n"] for item in items)

    first = Outbox(tmp_path / "box", deliver, 2, "somewhere")
    for n in range(5):
        first.put({"n": n})
    first.save()
    assert first.close(0.2) == 5
    assert [lacks(str(warning.message), "somewhere", "away") for warning in recwarn] == [[]]
    away = False
    second = Outbox(tmp_path / "box", deliver, 2, "somewhere", keep=lambda item: item["n"] != 3)
    second.put({"n": 5})
    assert second.close(20) == 0
    assert sent == [0, 1, 2, 4, 5]
    assert not (tmp_path / "box").exists()


def test_a_server_that_is_away_or_a_run_that_is_gone_is_refused(make_job, train, project):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        uri = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(ForgeError, match=naming(uri)):
        train(make_job(steps=1, job={"name": "away"}, loggers={"mlflow": MLflow(tracking_uri=uri, timeout_s=2)}))
    keys = {"steps": 4, "loggers": {"mlflow": MLflow(project=project, tracking_uri=database())}}
    train(make_job(**keys), Stops())
    client = client_of(database())
    client.delete_run(runs_of(client, project)[0].info.run_id)
    with pytest.raises(ForgeError, match=naming("experiment", 'branch = "again"')):
        train(make_job(**keys))


def test_without_sqlalchemy_the_job_is_refused_when_it_is_checked(make_job, train, monkeypatch):
    monkeypatch.setattr("forge_plugin_mlflow.mlflow_component.find_spec", lambda name: None)
    with refuses("loggers.mlflow.tracking_uri", "SQLAlchemy", 'pip install "forge-plugin-mlflow[sqlite]"'):
        train(make_job(steps=1, loggers={"mlflow": MLflow()}))
