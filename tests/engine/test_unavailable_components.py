"""A trained model is used where parts of its training are not installed, or have other keys; training is refused."""

from __future__ import annotations

import json
import shutil
import tomllib

import pytest
import tomli_w
import torch

from forge_core import JobError, Trainer, dump_job, load_job, load_model
from forge_core.checkpoint.run_folder import storage_of
from forge_core.cli import main
from forge_core.config.load import MODEL_TABLES, parse_job
from forge_core.contracts.components import OptimizerComponent, Unavailable
from forge_testing.refusals import at, lacks, refuses_all

IDS = [1, 2, 3, 4]
TEXT = "the cat sat on the mat and the dog sat on the log\n"
JOB = {
    "train": {"steps": 2, "global_batch_size": 4, "seq_len": 8, "device": "cpu", "precision": "bf16"},
    "model": {"type": "transformer", "dim": 16, "layers": 1, "attention": {"heads": 2}},
    "data": {"tokenizer": {"type": "bytes"}},
    "optimizer": {"type": "adamw_bf16", "lr": 0.05, "compile": False, "parameter_dtype": "bf16"},
    "parallel": {"activation_checkpointing": {}},
}
NOBODY = {"type": "forge-plugin-nowhere/nobody", "strength": 3, "inner": {"names": ["a"]}}
PARTS = {
    "optimizer": NOBODY,
    "scheduler": NOBODY,
    "loss": {"type": "cross_entropy", "z_loss": -1.0},
    "executor": {"type": "./gone.py:Executor"},
    "data.sources.0": NOBODY,
    "data.packing": {"type": "concatenate", "stride": 2},
    "data.loader": NOBODY,
    "parallel.activation_checkpointing": NOBODY,
    "evaluations.mine": NOBODY,
    "loggers.console": {"type": "console", "colour": "blue"},
    "hooks.mine": NOBODY,
}
"""By table: what nobody offers, a value that is refused, a file that is gone, keys that are unknown now."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    (folder / "a.txt").write_text(TEXT * 4)
    source = {"type": "text", "path": f"{folder}/a.txt", "held_out_every": 0}
    job = {**JOB, "job": {"output": str(folder)}, "data": {**JOB["data"], "sources": [source]}}
    return Trainer(job, echo=lambda text: None).run().folder


@pytest.fixture
def changed(run, tmp_path, monkeypatch):
    """(table -> what it is now) -> a copy of the run whose job has these tables."""

    def change(tables):
        shutil.copytree(run, tmp_path / "run")
        job = tomllib.loads((run / "job.toml").read_text())
        for path, table in tables.items():
            *parents, last = path.split(".")
            place = job
            for key in parents:
                place = place[int(key)] if isinstance(place, list) else place[key]
            place[int(last) if isinstance(place, list) else last] = table
        text = tomli_w.dumps(job)
        (tmp_path / "run/job.toml").write_text(text)
        for path in tmp_path.glob("run/checkpoints/*/manifest.json"):
            path.write_text(json.dumps({**json.loads(path.read_text()), "job": text}))
        return tmp_path / "run"

    monkeypatch.chdir(tmp_path)
    return change


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_logits_are_the_same_to_the_bit(run, changed, dtype):
    """Of parameters in bfloat16 too, which a model without its optimizer keeps in float32."""
    model, own = load_model(changed(PARTS), device="cpu", dtype=dtype), load_model(run, device="cpu", dtype=dtype)
    assert {parameter.dtype for parameter in own.model.parameters()} == {torch.bfloat16}
    assert torch.equal(model(IDS), own(IDS))
    assert isinstance(model.job.optimizer, Unavailable)
    assert isinstance(model.job.optimizer, OptimizerComponent)


def test_the_job_is_written_back_as_it_was(changed):
    text = (changed(PARTS) / "job.toml").read_text()
    assert dump_job(parse_job(text, "job.toml", needed=MODEL_TABLES)) == text


def test_what_can_be_read_is_read(run):
    text = (run / "job.toml").read_text()
    assert parse_job(text, "job.toml", needed=MODEL_TABLES) == parse_job(text, "job.toml")


def test_training_is_refused_with_every_reason(changed):
    run = changed(PARTS)
    with pytest.raises(JobError) as caught:
        load_job(run / "job.toml")
    reasons = [problem.message for problem in caught.value.problems]
    # Not by a job that was read for its model, either.
    job = parse_job((run / "job.toml").read_text(), str(run / "job.toml"), needed=MODEL_TABLES)
    with pytest.raises(JobError) as caught:
        Trainer(job, echo=lambda text: None).run()
    again = {problem.path: problem.message for problem in caught.value.problems}
    assert set(reasons) <= set(again.values())
    for path in PARTS:
        assert any(at.startswith(path) for at in again), path
    assert not lacks(again["optimizer.type"], "forge-plugin-nowhere", "Installed")
    assert "loggers.console.colour" in again


def test_to_build_one_is_refused_too(changed):
    job = load_model(changed({"loss": NOBODY}), device="cpu").job
    with refuses_all(at("type", "forge-plugin-nowhere"), at("", "pip install forge-plugin-nowhere")):
        job.loss.build(None)


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"model": NOBODY}, "model.type"),
        ({"model.ffn": NOBODY, "optimizer": NOBODY}, "model.ffn.type"),
        ({"model.ffn": {"type": "swiglu", "depth": 2}}, "model.ffn.depth"),
        ({"data.tokenizer": NOBODY}, "data.tokenizer.type"),
        ({"plugins.mine": NOBODY}, "plugins.mine.type"),
        ({"train.speed": 3}, "train.speed"),
    ],
)
def test_what_the_model_needs_is_refused_by_name(changed, capsys, tables, key):
    assert main(["generate", str(changed(tables)), "--prompt", "a"]) == 2
    shown = capsys.readouterr().err
    assert f": {key}: " in shown
    assert "optimizer.type" not in shown
    if NOBODY in tables.values():
        assert not lacks(shown, "pip install forge-plugin-nowhere")


def test_checkpoints_in_a_storage_of_a_plugin_are_found_without_the_model(changed, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from attrs import frozen\n"
        "from forge_core.checkpoint.storage import Local\n"
        "@frozen(kw_only=True)\n"
        "class Mine(Local):\n"
        "    pass\n"
    )
    storage = {"type": f"{tmp_path}/mine.py:Mine"}
    run = changed({"checkpoint.storage": storage, "model": NOBODY, "optimizer": NOBODY})
    assert storage_of(run).steps() == [2]
