"""What is told of a hang: who is late, in which phase, in which collective."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist

from forge_core.contracts.phase import Phase
from forge_core.launch.progress_beacon import ProgressBeacon
from forge_core.launch.watchdog import (
    describe_hang,
    describe_silence,
    line_of,
    oldest_unfinished,
    unfinished_collectives,
    waits_for_ranks,
)
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import lacks


def beat(count, phase="data", **more):
    return {"count": count, "step": 7, "phase": phase, "idle_s": 60.0, "host": "gpu01", **more}


def told(beats, size=None):
    return describe_hang(beats, size or len(beats), 60).splitlines()


def test_the_rank_that_has_come_least_far_is_late_and_shown_first():
    lines = told({0: beat(12, "optimizer"), 1: beat(12, "optimizer"), 2: beat(11, "data", line="loader.py:3 in read")})
    assert not lacks(lines[0], "launch.hang_timeout_s = 60 s")
    assert not lacks(lines[1], "rank 2 on gpu01", "late", "step 7, data")
    assert lines[2] == "  rank 2: step 7, data, for 60 s at loader.py:3 in read"


def test_in_the_same_phase_the_rank_that_waits_for_no_other_is_late():
    lines = told({0: beat(12, waits=True), 1: beat(12, waits=False), 2: beat(12, waits=True)})
    assert not lacks(lines[1], "rank 1 on gpu01", "late", "step 7, data")


def test_ranks_that_all_wait_for_each_other_are_not_called_late():
    lines = told({0: beat(12, waits=True, collective="all_reduce number 4"), 1: beat(12, waits=True)})
    assert not lacks(lines[1], "all", "data", "collective")
    assert "late" not in lines[1]
    assert not lacks(lines[2], "rank 0", "waiting", "all_reduce number 4")


def test_where_a_collective_was_left_out_the_rank_that_waits_for_it_is_not_blamed():
    lines = told({0: beat(11, "forward and backward", waits=True), 1: beat(12, "optimizer", waits=True)})
    assert not lacks(lines[1], "all", "forward and backward and optimizer", "collective")
    assert "late" not in lines[1]


def test_ranks_that_all_work_may_have_too_little_time():
    lines = told({0: beat(1, "building", waits=False), 1: beat(1, "building", waits=False)})
    assert not lacks(lines[1], "all", "building", "none")
    assert lacks(lines[1], "late", "collective") == ["late", "collective"]


def test_a_rank_that_has_told_nothing_is_late():
    assert not lacks(told({0: beat(3)}, size=2)[1], "rank 1", "late", "not begun")


def test_of_many_ranks_the_late_ones_are_shown():
    lines = told({rank: beat(11 if rank == 77 else 12) for rank in range(100)})
    assert not lacks(lines[1], "rank 77 on gpu01", "late", "step 7, data")
    assert lines[2].startswith("  rank 77: ")
    assert lines[-2] == "  and 68 more"


def test_phases_are_counted_and_keep_the_step():
    beacon = ProgressBeacon()
    beacon.enter(Phase.DATA, 3)
    beacon.enter(Phase.OPTIMIZER)
    assert (beacon.position.count, beacon.position.step, beacon.position.phase) == (2, 3, Phase.OPTIMIZER)


def test_a_hang_that_is_found_by_a_learnt_limit_says_so():
    lines = describe_hang({0: beat(12, idle_s=31.0), 1: beat(12, idle_s=34.0)}, 2, 1800).splitlines()
    assert not lacks(lines[0], "31 s", "launch.hang_factor")


def test_ranks_that_are_silent_are_named_with_their_machine():
    lines = describe_silence({0: beat(12, waits=True), 1: beat(12), 2: beat(11)}, [1, 2], 15.2).splitlines()
    assert not lacks(lines[0], "rank 1 on gpu01, rank 2 on gpu01", "15 s (launch.silence_timeout_s)")
    assert not lacks(lines[1], "process", "network")
    assert not lacks(lines[2], "rank 1", "step 7, data")


def test_a_frame_inside_torch_distributed_waits_for_ranks():
    seen = []

    class Spy(dict):
        def __getitem__(self, key):
            frame = sys._getframe()
            seen.append((waits_for_ranks(frame), line_of(frame)))
            raise KeyError

    with pytest.raises(KeyError):
        Spy()["x"]
    assert not seen[0][0]
    assert seen[0][1].startswith(__file__)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], ""),
        ([{"state": "completed", "retired": True}], ""),
        (
            [
                {"state": "scheduled", "retired": True},
                {
                    "state": "started",
                    "retired": False,
                    "profiling_name": "nccl:all_gather",
                    "collective_seq_id": 9,
                    "process_group": ["1", "mesh_shard"],
                    "input_sizes": [[8]],
                },
            ],
            "nccl:all_gather number 9 of group 1 mesh_shard over [[8]]",
        ),
    ],
)
def test_the_oldest_open_collective_of_a_record_is_told(entries, words):
    assert oldest_unfinished({"entries": entries}) == words


def test_the_collective_that_a_rank_waits_in_is_found():
    def wait(rank):
        found = ""
        if rank == 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            found = unfinished_collectives()
            dist.distributed_c10d._get_default_store().set("looked", "yes")
            work.wait()
        else:
            dist.distributed_c10d._get_default_store().get("looked")
            dist.all_reduce(torch.ones(3))
        return found

    assert run_on_ranks(2, wait)[0].startswith("gloo:all_reduce number 1 of group 0 default_pg over [[3]]")
