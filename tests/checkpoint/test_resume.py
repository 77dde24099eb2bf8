"""Checkpoints: exact resume, and damage."""

from __future__ import annotations

import pytest
import torch

from forge_core.checkpoint.state import model_tensors
from forge_core.cli.run import describe_summary
from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import CheckpointError, ResumeError
from forge_testing import Numbers, TinyModel
from forge_testing.refusals import lacks, naming


class Weights(TrainingHook):
    """Keeps weights and optimizer state at the end."""

    def on_train_end(self, context):
        self.tensors = {n: t.clone() for n, t in model_tensors(context.model).items()}
        for group in context.optimizer.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                for slot, value in context.optimizer.state[parameter].items():
                    self.tensors[f"{name}.{slot}"] = value.clone()


def curve(lines, summary):
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"], r["tokens"]) for r in lines(summary)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_cut_in_two_equals_the_whole_bit_for_bit(make_job, train, lines, precision, workers):
    sources = (Numbers(weight=2.0), Numbers(start=77, sequences=5))
    common = {
        "precision": precision,
        "micro_batch_size": 2,
        "model": TinyModel(dropout=0.3),
        "data": {"sources": sources, "workers": workers},
    }
    whole, first, second = Weights(), Weights(), Weights()
    expected = train(make_job(steps=7, job={"name": "whole"}, **common), whole)
    train(make_job(steps=3, job={"name": "cut"}, **common), first)
    found = train(make_job(steps=7, job={"name": "cut"}, **common), second)
    assert curve(lines, found) == curve(lines, expected)
    assert whole.tensors.keys() == second.tensors.keys()
    assert all(torch.equal(whole.tensors[name], second.tensors[name]) for name in whole.tensors)


def test_saving_changes_nothing(make_job, train, lines):
    often = train(make_job(checkpoint={"interval": 1}, job={"name": "often"}))
    never = train(make_job(checkpoint={"interval": 0}, job={"name": "never"}))
    assert curve(lines, often) == curve(lines, never)


def test_a_finished_run_stays_finished(make_job, train, lines):
    train(make_job())
    again = train(make_job())
    assert (again.step, again.stopped) == (4, "")
    assert len(lines(again)) == 4


def test_metrics_have_no_step_twice_after_a_crash(make_job, train, lines):
    class Crash(TrainingHook):
        def on_step_begin(self, context):
            if context.step == 4:
                raise RuntimeError("power cut")

    job = make_job(steps=5, checkpoint={"interval": 2})
    with pytest.raises(RuntimeError, match="power cut"):
        train(job, Crash())
    summary = train(job)
    assert [record["step"] for record in lines(summary)] == [1, 2, 3, 4, 5]


def test_never_refuses_a_folder_that_has_steps(make_job, train):
    train(make_job())
    with pytest.raises(ResumeError, match=naming("steps [4]", "job.name", "--resume auto")):
        train(make_job(), resume="never")


def test_a_misspelt_word_for_resume_is_named_and_a_path_that_has_gone_is_not(make_job, train):
    train(make_job())
    with pytest.raises(CheckpointError, match="did you mean 'never'"):
        train(make_job(), resume="nver")
    assert train(make_job(), resume="runs/gone/checkpoints/step-2").loss is None


def test_a_run_without_steps_left_says_so(make_job, train):
    assert "loss" in describe_summary(train(make_job())).partition("\n")[0]
    first_line = describe_summary(train(make_job())).partition("\n")[0]
    assert "loss" not in first_line
    assert not lacks(first_line, "train.steps", 4)


@pytest.mark.parametrize("which", ["run", "run/checkpoints/step-2"])
def test_a_path_starts_from_another_runs_checkpoint(make_job, train, lines, tmp_path, which):
    train(make_job(steps=2))
    straight = train(make_job(steps=4, job={"name": "straight"}))
    other = train(make_job(steps=4, job={"name": "other"}), resume=str(tmp_path / which))
    assert curve(lines, other) == curve(lines, straight)[2:]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (flip, "SHA-256"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"\b{shorter} bytes\b.*\b{size}\b"),
        (lambda path: path.unlink(), "missing"),
    ],
)
@pytest.mark.parametrize("file", ["__0_0.distcp", "index.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(make_job, train, lines, damage, fault, file):
    straight = train(make_job(steps=5, job={"name": "straight"}))
    summary = train(make_job(steps=4, checkpoint={"interval": 2}))
    path = summary.folder / "checkpoints/step-4" / file
    size = path.stat().st_size
    damage(path)
    with pytest.warns(UserWarning, match=f"step-4/{file}.*{fault.format(size=size, shorter=size - 1)}"):
        again = train(make_job(steps=5))
    assert curve(lines, again) == curve(lines, straight)


def test_with_no_intact_checkpoint_the_run_refuses(make_job, train):
    summary = train(make_job())
    flip(summary.folder / "checkpoints/step-4/__0_0.distcp")
    with (
        pytest.warns(UserWarning, match="SHA-256"),
        pytest.raises(CheckpointError, match=naming("intact", "step-4")),
    ):
        train(make_job(steps=5))


def test_an_unfinished_checkpoint_is_not_seen(make_job, train):
    summary = train(make_job(checkpoint={"interval": 2}))
    folder = summary.folder / "checkpoints"
    (folder / "step-4").rename(folder / "step-4.tmp")
    assert train(make_job()).step == 4
    assert sorted(p.name for p in folder.iterdir()) == ["step-2", "step-4"]


def test_a_model_whose_code_gives_another_shape_is_refused_with_both_shapes(make_job, train, monkeypatch):
    train(make_job())
    monkeypatch.setattr("forge_testing.tiny.VOCABULARY", 48)
    with pytest.raises(CheckpointError, match=r"embedding\.weight .*\[32, 16\].*\[48, 16\]"):
        train(make_job(steps=5))
