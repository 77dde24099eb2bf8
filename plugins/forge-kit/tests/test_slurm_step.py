"""Which tasks of SLURM are ranks, and where they meet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.launch.world import World, join_world
from forge_kit.tools.slurm_step import PORTS, first_host, tasks_of_shell

STEP = {
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NODELIST": "gpu[09-10]",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
"""What srun gave to a task, as seen on a cluster."""

BATCH = {"SLURM_JOB_ID": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
"""What a batch script had: a rank's number, but of no step."""

SALLOC = {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "2", "SLURM_NODELIST": "vm"}


@pytest.mark.parametrize("variables", [BATCH, SALLOC])
def test_a_batch_script_and_a_shell_are_no_ranks(variables):
    assert join_world(dict(variables)) == World()


def test_a_task_of_a_slurm_step_is_a_rank():
    variables = dict(STEP)
    world = join_world(variables)
    assert (world.rank, world.size, world.address) == (5, 6, "gpu09")
    assert world.port in PORTS
    assert (variables["RANK"], variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"]) == ("5", "1", "2")
    assert variables["FORGE_OWN_DEVICES"] == "1", "SLURM may show each task its own GPUs only"
    assert join_world(variables) == world, "asked again, with what it has written itself"


def test_all_tasks_of_a_step_find_the_same_port_and_other_steps_another():
    ports = {
        (job, step): join_world(STEP | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "SLURM_PROCID": rank}).port
        for job in ("123", "124")
        for step in ("0", "1", "2")
        for rank in ("0", "5")
    }
    assert len(set(ports.values())) == 6


def test_given_address_and_port_count():
    world = join_world(STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711"})
    assert (world.address, world.port) == ("10.0.0.1", 4711)


def test_on_one_node_no_name_need_be_resolved():
    one = STEP | {"SLURM_STEP_NODELIST": "gpu09", "SLURM_STEP_TASKS_PER_NODE": "6", "SLURM_NODEID": "0"}
    assert join_world(one).address == "127.0.0.1"


def test_a_step_of_one_task_is_a_shell_like_any_other():
    assert join_world(STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == World()


@pytest.mark.parametrize(("variables", "tasks"), [({}, 1), (BATCH, 2), (SALLOC, 2), (STEP, 1)])
def test_tasks_that_a_shell_leaves_idle_are_known(variables, tasks):
    assert tasks_of_shell(variables) == tasks


@pytest.mark.parametrize(
    ("short", "first"),
    [
        ("vm", "vm"),
        ("b-1,a", "b-1"),
        ("b-1,gpu[01-03]", "b-1"),
        ("gpu[01-03,7],login1", "gpu01"),
        ("gpu[7,9],cpu[1,2]", "gpu7"),
        ("n[098-101]", "n098"),
        ("r[1-2]n[1-2].x", "r1n1.x"),
        ("r[1-2]n[3,4].x,r5n[1-2].x", "r1n3.x"),
    ],
)
def test_the_first_host_of_a_short_form_is_where_rank_0_is(short, first):
    assert first_host(short) == first


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), min_size=1, max_size=4), st.sampled_from(["", "x-1"]))
def test_the_first_host_keeps_its_zeros_whatever_follows(ranges, other):
    short = ",".join(f"{first:03d}-{first + more:03d}" for first, more in ranges)
    assert first_host(f"n[{short}],{other}".strip(",")) == f"n{ranges[0][0]:03d}"
