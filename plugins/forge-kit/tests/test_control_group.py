"""What the kernel says of memory and kills, in the files of both versions of control groups."""

from __future__ import annotations

import signal

import pytest

from forge_kit.tools import supervisor
from forge_kit.tools.control_group import MemoryGroup
from forge_kit.tools.supervisor import RankHandle
from forge_testing.refusals import lacks

TWO = {
    "proc/self/cgroup": "0::/slurm/job_7\n",
    "sys/fs/cgroup/slurm/job_7/memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 0\n",
    "sys/fs/cgroup/slurm/job_7/memory.max": "16000000000\n",
}
ONE = {
    "proc/self/cgroup": "5:devices:/\n4:memory:/job\n0::/\n",
    "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "16000000000\n",
}
UNLIMITED = {
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/memory.events": "oom_kill 0\n",
    "sys/fs/cgroup/memory.max": "max\n",
}


@pytest.mark.parametrize(
    ("files", "kills", "limit"), [(TWO, 2, 16 * 10**9), (ONE, 2, 16 * 10**9), (UNLIMITED, 0, 0), ({}, 0, 0)]
)
def test_kills_and_limit_are_those_of_the_own_group(tmp_path, files, kills, limit):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (MemoryGroup(tmp_path).kills(), MemoryGroup(tmp_path).limit()) == (kills, limit)


class Killed:
    returncode = -signal.SIGKILL


@pytest.mark.parametrize(
    ("before", "facts"), [(1, ["control group", "16.0 GB"]), (2, ["the machine may be short of memory"])]
)
def test_a_rank_that_the_kernel_killed_for_memory_is_distinguished_from_one_that_was_killed(monkeypatch, before, facts):
    monkeypatch.setattr(MemoryGroup, "kills", lambda self: 2)
    monkeypatch.setattr(MemoryGroup, "limit", lambda self: 16 * 10**9)
    assert not lacks(supervisor._ended_by(RankHandle(3, Killed(), None), before).message, "rank 3", "SIGKILL", *facts)
