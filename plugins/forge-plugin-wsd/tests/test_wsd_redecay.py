"""One stable run, and decays from any of its checkpoints, as the README has it: by the command line."""

from __future__ import annotations

import json
import shutil

import pytest

from forge_core.cli import main
from forge_testing.refusals import lacks

BASE = """
[job]
name = "base"
output = "{output}"
[train]
steps = 12
global_batch_size = 4
seq_len = 8
precision = "fp64"
device = "cpu"
[checkpoint]
interval = 4
[model]
type = "forge_testing:TinyModel"
dropout = 0.1
[optimizer]
type = "forge_testing:TinyAdamW"
[scheduler]
type = "wsd"
warmup_steps = 2
decay_fraction = 0
[[data.sources]]
type = "forge_testing:Numbers"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of 12 updates at the base rate, with checkpoints every 4."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "base.toml").write_text(BASE.format(output=folder))
    assert main([str(folder / "base.toml")]) == 0
    return folder


def branch(folder, name, *arguments, steps=12):
    """Exit code of `base.toml` under another name."""
    return main([str(folder / "base.toml"), f"--job.name={name}", f"--train.steps={steps}", *arguments])


def records(folder, name):
    read = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: (record["loss"], record["lr"]) for record in read if "loss" in record}


@pytest.mark.parametrize(("stable", "steps"), [(4, 7), (8, 11), (8, 14)])
def test_a_decay_from_a_stable_checkpoint_is_the_end_of_a_run_planned_so(folder, stable, steps):
    name, decay = f"from-{stable}-to-{steps}", f"--scheduler.decay_steps={steps - stable}"
    resume = f"--resume={folder / f'base/checkpoints/step-{stable}'}"
    assert branch(folder, name, resume, decay, steps=steps) == 0
    assert branch(folder, f"planned-{steps}", decay, steps=steps) == 0
    planned = records(folder, f"planned-{steps}")
    assert records(folder, name) == {step: planned[step] for step in range(stable + 1, steps + 1)}
    rates = [planned[step][1] for step in range(stable, steps + 1)]
    assert rates[0] == rates[1], "the decay begins at the base rate, with the first update after the checkpoint"
    assert rates[1:] == sorted(rates[1:], reverse=True) != [rates[0]] * (steps - stable)


def test_a_branch_that_was_cut_short_continues_by_the_same_command(folder):
    arguments = (f"--resume={folder / 'base/checkpoints/step-4'}", "--scheduler.decay_steps=6")
    assert branch(folder, "cut", *arguments, steps=10) == 0
    whole = records(folder, "cut")
    shutil.rmtree(folder / "cut/checkpoints/step-10")
    assert branch(folder, "cut", *arguments, steps=10) == 0
    assert records(folder, "cut") == whole


def test_a_checkpoint_of_the_decay_is_told_of(folder, capsys):
    assert branch(folder, "decayed", "--scheduler.decay_steps=6", "--scheduler.shape=linear") == 0
    capsys.readouterr()
    resume = f"--resume={folder / 'decayed/checkpoints/step-8'}"
    assert branch(folder, "late", resume, "--scheduler.decay_steps=2", "--scheduler.shape=linear", steps=10) == 0
    assert not lacks(capsys.readouterr().out, "schedule", "update 8", 0.8333)


def test_nothing_is_told_where_the_past_is_as_it_was(folder, capsys):
    resume = f"--resume={folder / 'base/checkpoints/step-8'}"
    assert branch(folder, "quiet", resume, "--scheduler.decay_steps=2", steps=10) == 0
    out = capsys.readouterr().out
    assert "scheduler.decay_steps: 0 -> 2" in out
    assert "schedule" not in out.replace("scheduler", "")


def test_another_warm_up_must_be_asked_for(folder, capsys):
    resume = f"--resume={folder / 'base/checkpoints/step-8'}"
    assert branch(folder, "warm", resume, "--scheduler.warmup_steps=3") == 2
    assert "need --resume-with-changes:\n    scheduler.warmup_steps: 2 -> 3" in capsys.readouterr().err
