"""What the harness of kills looks at: no difference escapes it, and it knows what it killed."""

from __future__ import annotations

import json
import shutil

import pytest
from harness.outcome import damaged, differences, irregular, read_outcome
from harness.scenarios import merge, scenarios
from harness.trial import plan_kills
from parts.hooks import SEEN, Seen

from forge_core.checkpoint.storage import MANIFEST
from forge_testing.refusals import lacks


@pytest.fixture
def run(make_job, train):
    """The folder of a finished run."""
    return train(make_job(checkpoint={"interval": 2}), Seen()).folder


@pytest.fixture
def twin(run, tmp_path):
    """A copy of it."""
    return shutil.copytree(run, tmp_path / "twin")


def edit(path, change):
    path.write_text(change(path.read_text()))


def test_two_runs_of_a_job_do_not_differ_though_their_times_do(make_job, train, run, tmp_path):
    run.rename(tmp_path / "first")
    train(make_job(checkpoint={"interval": 2}), Seen())
    assert differences(read_outcome(tmp_path / "first"), read_outcome(run)) == []


@pytest.mark.parametrize(
    ("file", "change", "found"),
    [
        ("metrics.jsonl", lambda text: text + text.splitlines(True)[-1], "metrics.5.step: nothing without kills"),
        ("metrics.jsonl", lambda text: "".join(text.splitlines(True)[1:]), "metrics.0.step: 1 without kills, 2 with"),
        (SEEN, lambda text: text.replace('"step": 3, "samples": ["', '"step": 3, "samples": ["x'), "samples.3.0.0: "),
        (f"checkpoints/step-4/{MANIFEST}", lambda text: text.replace('"tokens": 128', '"tokens": 129'), "tokens"),
        (f"checkpoints/step-4/{MANIFEST}", lambda text: text.replace('"skipped": 0', '"skipped": 0.0'), "progress"),
    ],
    ids=["a step twice", "a gap", "another sample", "another count", "another type"],
)
def test_a_difference_is_found(run, twin, file, change, found):
    edit(twin / file, change)
    assert any(found in line for line in differences(read_outcome(run), read_outcome(twin)))


def test_a_checkpoint_too_many_is_a_difference(run, twin):
    (twin / "checkpoints/step-3.tmp").mkdir()
    assert differences(read_outcome(run), read_outcome(twin)) != []


def test_samples_that_differ_between_two_processes_are_a_difference(run, twin):
    lines = (twin / SEEN).read_text().splitlines()
    other = next(record for line in lines if (record := json.loads(line)).get("step") == 2)
    edit(twin / SEEN, lambda text: json.dumps({**other, "samples": ["x"]}) + "\n" + text)
    assert any(line.startswith("samples.2") for line in differences(read_outcome(run), read_outcome(twin)))


def test_damage_under_a_final_name_is_found(run):
    assert damaged(run) == []
    (run / "checkpoints/step-2" / MANIFEST).unlink()
    data = max((run / "checkpoints/step-4").iterdir(), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    first, second = damaged(run)
    assert first.startswith(f"step 2: {MANIFEST}")
    assert second.startswith(f"step 4: {data.name} ")


def test_lines_that_are_wrong_by_themselves_are_found():
    lines = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0}, {"step": 2, "eval/loss": 1.0}]
    assert irregular(lines, 2) == []
    [steps] = irregular(lines, 3)
    assert not lacks(steps, "metrics.jsonl", "[1, 2]")
    [evaluations] = irregular([*lines, lines[-1]], 2)
    assert not lacks(evaluations, "metrics.jsonl", "[2, 2]")


def test_a_seed_plans_the_same_kills_again():
    assert plan_kills("a", (3, 9), 4.0) == plan_kills("a", (3, 9), 4.0)
    assert plan_kills("a", (3, 9), 4.0) != plan_kills("b", (3, 9), 4.0)


def test_every_installed_optimizer_has_a_scenario(catalog):
    optimizers = {scenario.job["optimizer"]["type"] for scenario in scenarios(catalog).values()}
    assert optimizers >= {offer.qualified for offer in catalog.offers("optimizer")}


def test_a_table_with_a_type_replaces_the_one_below():
    below = {"model": {"type": "a", "dim": 4}, "train": {"steps": 2, "seq_len": 8}}
    merged = merge(below, {"model": {"type": "b"}, "train": {"steps": 3}})
    assert merged == {"model": {"type": "b"}, "train": {"steps": 3, "seq_len": 8}}
