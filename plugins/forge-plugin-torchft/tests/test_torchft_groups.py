"""Groups of processes: what each step is made of, who is lost, who comes back."""

from __future__ import annotations

import time

import attrs
import pytest
import torch

pytest.importorskip("torchft", reason="torchft is not installed: it has wheels for Linux")

from torchft_groups import Group, Lighthouse, OneProcess, Watch, apart, by_fed, group_job, pick, plain_job

from forge_testing import PenalisedModel
from forge_testing.refusals import lacks

pytestmark = pytest.mark.slow

SAME = {"rtol": 1e-11, "atol": 1e-12}


def test_a_killed_group_costs_one_step_and_comes_back_with_the_state_of_the_others(tmp_path):
    steps, coming = {"steps": 16}, tmp_path / "coming"
    with Lighthouse() as address:
        living = Group(group_job(tmp_path, address, 0, train=steps), Watch(wait_at=10, wait_for=str(coming)))
        job = group_job(tmp_path, address, 1, train=steps)
        killed = Group(job, Watch(kill_at=6))
        assert killed.wait() is None
        time.sleep(1)  # so that the lighthouse has noticed
        back = Group(job, mark=coming)
        weights, healed = living.wait(), back.wait()
    assert all(torch.equal(healed[name], weight) for name, weight in weights.items())  # to the bit
    lines, after = living.lines(), {line["step"]: line for line in back.lines()}
    present = [by_fed(line, 2) for line in lines]
    assert present[:5] == [[0, 1]] * 5
    assert present[5] == []  # group 1 died in it
    assert present[6:10] == [[0]] * 4  # alone
    assert present[10:] == [[0, 1]] * 6
    assert [line["participants"] for line in lines] == [len(groups) for groups in present]
    assert min(after) == 11  # it has no checkpoint, and no lines of the steps before
    assert all(after[line["step"]]["loss"] == line["loss"] for line in lines[10:])

    def in_one_process():
        one = OneProcess(plain_job(tmp_path, train=steps), tmp_path)
        for line, groups in zip(lines, present, strict=True):
            rows = one.rows()
            if groups:
                rows = pick(rows, groups, 2)
                assert int((rows["labels"] >= 0).sum()) == line["fed"]
                one.gradients(rows)
                one.update()
                assert line["loss"] == pytest.approx(one.losses[-1], rel=1e-11)
        return one.weights

    for name, weight in apart(in_one_process).items():
        torch.testing.assert_close(weights[name], weight, **SAME)


def test_all_groups_together_make_the_curve_of_one_run_and_continue_it(tmp_path):
    model = PenalisedModel()  # with auxiliary losses by token, sequence and layer
    one = Group(plain_job(tmp_path, job={"name": "one"}, model=model, train={"steps": 6}))
    with Lighthouse() as address:
        for stop_at in (3, 0):
            jobs = [group_job(tmp_path, address, group, model=model, train={"steps": 6}) for group in (0, 1)]
            groups = [Group(job, Watch(stop_at=stop_at)) for job in jobs]
            weights = [group.wait() for group in groups]
            assert [group.process.exitcode for group in groups] == [0, 0]
    assert all(torch.equal(weights[1][name], weight) for name, weight in weights[0].items())
    assert not isinstance(one.wait(), str)
    for group in groups:
        assert [line["step"] for line in group.lines()] == [1, 2, 3, 4, 5, 6]
        for line, expected in zip(group.lines(), one.lines(), strict=True):
            for key in ("loss", "grad_norm", *(name for name in expected if "penalty" in name)):
                assert line[key] == pytest.approx(expected[key], rel=1e-9), key


def test_with_fewer_than_min_groups_the_living_wait(tmp_path):
    def job(group):
        made = group_job(tmp_path, address, group, train={"steps": 8})
        return attrs.evolve(made, parallel={"torchft": attrs.evolve(made.parallel["torchft"], min_groups=2)})

    with Lighthouse() as address:
        living, killed = Group(job(0)), Group(job(1), Watch(kill_at=4))
        assert killed.wait() is None
        time.sleep(1.5)  # longer than the other would need for all its steps
        back = Group(job(1))
        weights, healed = living.wait(), back.wait()
    assert [line["participants"] for line in living.lines()] == [2, 2, 2, 0, 2, 2, 2, 2]
    assert all(torch.equal(healed[name], weight) for name, weight in weights.items())


def test_a_group_that_a_signal_stops_costs_the_others_no_step(tmp_path):
    with Lighthouse() as address:
        jobs = [group_job(tmp_path, address, group, train={"steps": 8}) for group in (0, 1)]
        groups = [Group(jobs[0]), Group(jobs[1], Watch(signal_at=4))]
        assert all(isinstance(group.wait(), dict) for group in groups)
    assert [line["participants"] for line in groups[0].lines()] == [2, 2, 2, 2, 1, 1, 1, 1]
    assert [line["step"] for line in groups[1].lines()] == [1, 2, 3, 4]


def test_a_group_with_another_job_or_the_number_of_another_is_refused(tmp_path):
    with Lighthouse() as address:
        jobs = [group_job(tmp_path, address, group, train={"steps": 2, "seq_len": 8 * (group + 1)}) for group in (0, 1)]
        words = [group.wait() for group in [Group(job) for job in jobs]]
    assert not lacks(words[0], "group 1", "job")
    assert not lacks(words[1], "group 0", "job")


def test_a_lighthouse_that_does_not_answer_is_named_within_the_limit(tmp_path):
    job = group_job(tmp_path, "http://127.0.0.1:9", 0)
    stage = attrs.evolve(job.parallel["torchft"], connect_timeout_s=0.5)
    words = Group(attrs.evolve(job, parallel={"torchft": stage})).wait()
    assert not lacks(words, "http://127.0.0.1:9", "0.5 s", "forge-run launch lighthouse --port=9")


def test_a_group_with_another_secret_takes_no_state_and_ends_with_the_reason(tmp_path, monkeypatch):
    coming = tmp_path / "coming"
    with Lighthouse() as address:
        monkeypatch.setenv("FORGE_GROUP_SECRET", "ours")
        living = Group(group_job(tmp_path, address, 0, train={"steps": 8}), Watch(wait_at=4, wait_for=str(coming)))
        job = group_job(tmp_path, address, 1, train={"steps": 8})
        assert Group(job, Watch(kill_at=3)).wait() is None
        time.sleep(1)
        monkeypatch.setenv("FORGE_GROUP_SECRET", "guessed")
        words = Group(job, mark=coming).wait()
        assert isinstance(living.wait(), dict)
    assert not lacks(words, "FORGE_GROUP_SECRET")
