"""Trunks: the contract of their hook, and where runs branch."""

from __future__ import annotations

import pytest
from attrs import evolve

from forge_core import load_job
from forge_core.contracts.errors import JobError
from forge_plugin_ladder.branch_points import BranchPoints
from forge_plugin_ladder.trunk import shared_steps
from forge_testing.catalogs import installed
from forge_testing.suites import HookSuite


class TestBranchPoints(HookSuite):
    component = BranchPoints(steps=(2, 5))
    needs_cpu = "a checkpoint is copied to the host, after the steps that the job names"

    def _job(self, folder, hook, name, **changes):
        # Saves of the job's own interval would hide those of the hook
        job = super()._job(folder, hook, name, **changes)
        return evolve(job, checkpoint=evolve(job.checkpoint, interval=0, keep=0))

    def test_its_steps_are_saved(self, tmp_path):
        self.train(self._job(tmp_path, self.make(tmp_path), "run"))
        assert sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step-*")) == [
            "step-2",
            "step-5",
            "step-6",
        ]


JOB = """
[train]
steps = 40
global_batch_size = 2
seq_len = 8
[model]
type = "forge_testing:TinyModel"
[[data.sources]]
type = "forge_testing:Numbers"
[optimizer]
type = "adamw"
[scheduler]
type = "wsd"
warmup_steps = 2
"""


def job(tmp_path, *changes):
    (tmp_path / "job.toml").write_text(JOB)
    return load_job(tmp_path / "job.toml", overrides=list(changes), catalog=installed(), world_size=1)


@pytest.mark.parametrize(
    ("changes", "shared", "reason"),
    [
        # The first update of a decay by 1 - sqrt(progress) has the whole rate
        (["--train.steps=20"], 17, "`scheduler`"),
        (["--train.steps=20", "--scheduler.decay_steps=5"], 16, "`scheduler`"),
        (["--train.steps=40", "--scheduler.shape=linear"], 33, "`scheduler`"),
        (["--train.steps=20", "--scheduler.warmup_steps=3"], 0, "scheduler.warmup_steps: 2 -> 3"),
        (["--train.steps=20", "--optimizer.lr=0.5"], 0, "optimizer.lr"),
        # Safe to change in a run that continues, and still not equal to the bit
        (["--train.steps=20", "--train.micro_batch_size=1"], 0, "train.micro_batch_size"),
        (["--train.steps=20", "--scheduler.type=cosine"], 0, "scheduler.type"),
    ],
)
def test_runs_branch_where_their_rates_part(tmp_path, changes, shared, reason):
    found = shared_steps(job(tmp_path), job(tmp_path, *changes), installed())
    assert found[0] == shared
    assert reason in found[1]


def test_a_schedule_of_the_whole_run_has_no_trunk_and_a_constant_one_is_all_trunk(tmp_path):
    cosine = ["--scheduler={type = 'cosine'}"]
    assert shared_steps(job(tmp_path, *cosine), job(tmp_path, *cosine, "--train.steps=20"), installed())[0] == 1
    constant = ["--scheduler={type = 'constant'}"]
    assert shared_steps(job(tmp_path, *constant), job(tmp_path, *constant, "--train.steps=20"), installed())[0] == 19


@pytest.mark.parametrize(
    ("steps", "keep", "message"),
    [("[2, 41]", 0, "41 is behind the last step, 40"), ("[2]", 3, "keep = 3 would delete")],
)
def test_points_that_would_not_stay_are_refused(tmp_path, steps, keep, message):
    hook = ["--hooks.points.type=forge-plugin-ladder/branch_points", f"--hooks.points.steps={steps}"]
    with pytest.raises(JobError, match=message):
        job(tmp_path, *hook, f"--checkpoint.keep={keep}")
