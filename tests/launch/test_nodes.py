"""`forge-run launch local --nodes`: launchers of several machines, here of one, whose ranks make one run."""

from __future__ import annotations

import signal

import pytest

from forge_core.checkpoint.run_folder import RunFolder
from forge_core.contracts.run_end import Cause
from forge_testing.refusals import lacks

from .conftest import wait_for_step
from .test_other_launchers import free_port


def launchers(job, *words: str, nodes: int = 2, nproc: int = 1, each=((), ())):
    """A launcher for each node, as a cluster starts them."""
    port = free_port()
    places = [f"--nproc={nproc}", f"--nodes={nodes}", "--address=127.0.0.1", f"--port={port}"]
    return [
        job.start(*words, *each[number], *places, f"--node={number}", command=("launch", "local"))
        for number in range(nodes)
    ]


@pytest.mark.slow
def test_two_launchers_make_one_run_and_both_end_with_its_exit_code(job):
    both = launchers(job, *job.trouble(), nproc=2)
    (code, out, _), (other, silent, _) = map(job.finish, both)
    assert (code, other) == (0, 0)
    assert "finished at step 6" in out
    assert silent == "", "rank 0 is on node 0"
    assert sorted(path.name for path in (job.run / "logs").iterdir()) == [f"rank-{rank}.log" for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
def test_a_request_to_stop_at_one_node_saves_and_ends_all_with_75_and_the_run_continues(job, asked):
    slow = job.trouble(pause_s=0.2)
    both = launchers(job, *slow)
    wait_for_step(both[0], 2)
    both[asked].send_signal(signal.SIGTERM)
    assert [job.finish(each)[0] for each in both] == [75, 75]
    saved = job.steps_saved()
    assert saved
    assert saved[-1] < 6
    assert [job.finish(each)[0] for each in launchers(job, *slow)] == [0, 0]
    assert job.steps_saved()[-1] == 6


@pytest.mark.slow
@pytest.mark.parametrize("what", ["raise", "SIGKILL"])
def test_a_rank_that_fails_on_another_node_ends_all_with_its_error_and_record(job, what):
    both = launchers(job, *job.trouble(what, rank=1))
    (code, _, first), (other, _, second) = map(job.finish, both)
    assert (code, other) == (1, 1)
    assert not lacks(second, "the flux is out of bounds" if what == "raise" else "rank 1 was killed by SIGKILL")
    # Of a kill the ranks of the other node have only seen that a connection is gone; its launcher finds the record
    raised = ["rank 1 has ended the run: ValueError: the flux"]
    killed = ["rank 0 failed", "the cause, on", "rank 1 was killed by SIGKILL"]
    assert not lacks(first, *(raised if what == "raise" else killed))
    end = RunFolder(job.run).end()
    assert (end.cause, end.rank) == ((Cause.FAILED, 1) if what == "raise" else (Cause.KILLED, 1))


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--nodes=2"], ["--node and --address"]),
        (["--nodes=2", "--node=2", "--address=a"], ["--node=2", "0 to 1"]),
        (["--node=0"], ["--node", "--nodes"]),
        (["--port=29400"], ["--port", "--nodes"]),
        (["--nodes=3", "--node=0", "--address=a"], ["train.global_batch_size", "3"]),
    ],
)
def test_a_place_that_cannot_be_is_refused_before_a_rank_starts(job, words, facts):
    code, _, err = job.finish(job.start("--nproc=1", *words, command=("launch", "local")))
    assert (code, lacks(err, *facts)) == (2, []), err
