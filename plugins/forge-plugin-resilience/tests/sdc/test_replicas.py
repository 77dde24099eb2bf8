"""Copies of the model that are compared: a flipped bit of a weight, and what may differ."""

from __future__ import annotations

import pytest
from flipped_bits import LAYOUTS, FlipsWeight, curve, curves

from forge_core.contracts.layout import Layout
from forge_plugin_parallel import FSDP
from forge_plugin_resilience.sdc import Replicas
from forge_plugin_resilience.sdc.replicas import copies, odd_ones
from forge_testing.refusals import at, check_problems, lacks, problems_of
from forge_testing.tiny import job_problems, tiny_job

LAYOUTS["hsdp4"] = (4, {"fsdp": FSDP(replicate=2)})


def hooks(every=2, rank=1, **keys):
    return {"hooks": {"flips": FlipsWeight(rank=rank), "replicas": Replicas(every=every, **keys)}}


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_a_flipped_weight_of_one_of_three_copies_is_named_before_it_is_saved(tmp_path, rank):
    ends = curve(tmp_path, layout="ddp3", global_batch_size=6, checkpoint={"interval": 2}, **hooks(rank=rank))
    assert {end[:2] for end in ends} == {("CorruptionError", 77)}
    text = ends[0][2]
    assert not lacks(text, "step 4", f"rank {rank}", "embedding.weight")
    assert not [other for other in {0, 1, 2} - {rank} if f"rank {other} on " in text]
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-2"]


def test_of_two_copies_both_are_named(tmp_path):
    [(name, code, text), _] = curve(tmp_path, layout="ddp2", **hooks(rank=0))
    assert (name, code) == ("CorruptionError", 77)
    assert text.count("no majority") == 2


def test_there_is_a_comparison_before_each_save_too(tmp_path):
    [(_, _, text), _] = curve(tmp_path, layout="ddp2", steps=6, checkpoint={"interval": 5}, **hooks(every=100))
    assert not lacks(text, "step 5")
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.thorough
def test_copies_of_sharded_weights_are_those_of_one_shard(tmp_path):
    ends = curve(tmp_path, layout="hsdp4", **hooks(rank=3))
    assert "rank 1 on" in ends[0][2]
    assert "rank 3 on" in ends[0][2]
    assert "rank 0 on" not in ends[0][2]


def test_clean_copies_give_no_alarm_and_with_warn_the_run_goes_on(tmp_path):
    runs = {"clean": hooks(every=1, rank=99), "plain": {}, "warned": hooks(on_fault="warn")}
    made = curves(tmp_path, "ddp2", None, runs)
    assert [row[0] for row in made["clean"][0]] == [1, 2, 3, 4, 5]
    assert made["clean"] == made["plain"]
    assert len(made["warned"][0]) == 5


def test_a_job_without_copies_is_refused():
    problems = problems_of(tiny_job("runs", hooks={"replicas": Replicas()}))
    check_problems(problems, at("hooks.replicas", "copies"))
    assert not job_problems(tiny_job("runs", hooks={"replicas": Replicas()}), ranks=2)


def test_copies_are_the_ranks_that_differ_in_replicate_alone():
    assert copies(Layout(replicate=2, shard=2)) == [[0, 2], [1, 3]]
    assert copies(Layout(replicate=3)) == [[0, 1, 2]]
    assert copies(Layout(replicate=2, tp=2)) == [[0, 2], [1, 3]]


def test_the_majority_decides():
    assert odd_ones(["a", "a"], [4, 5]) == []
    assert [rank for rank, _ in odd_ones(["a", "b", "a"], [4, 5, 6])] == [5]
    assert [rank for rank, _ in odd_ones(["a", "b"], [4, 5])] == [4, 5]
    assert [rank for rank, _ in odd_ones(["a", "b", "a", "b"], [0, 1, 2, 3])] == [0, 1, 2, 3]
