"""The variables that SLURM sets for the tasks that `srun` starts.

Only the tasks of a step are ranks. A batch script and the shell of `salloc` have `SLURM_NTASKS` too, and the former
even `SLURM_PROCID`, but no variable of a step: these are what to look for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

PORTS = range(20000, 32000)
"""Below those that Linux takes for outgoing connections."""


def is_rank_of_step(variables: Mapping[str, str]) -> bool:
    """Whether this process is one of several tasks of a step. A step of one task, such as `srun --pty bash`, is a shell
    like any other."""
    several = variables.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    return several and "SLURM_STEP_ID" in variables and "SLURM_PROCID" in variables


def tasks_of_shell(variables: Mapping[str, str]) -> int:
    """Tasks that were allotted to a batch script or a `salloc` shell, which runs none of them itself; else 1."""
    if "SLURM_STEP_ID" in variables:
        return 1
    return int(variables.get("SLURM_NTASKS", "1"))


def rank_of_step(variables: Mapping[str, str]) -> dict[str, str]:
    """`RANK` and its fellows, for a task of a step. `MASTER_ADDR` and `MASTER_PORT` stay as they are if they are set.

    The address is the first host of the step, where `srun` puts task 0 by default; loopback if there
    is only one. The port follows from the numbers of job and step, so that all tasks know it, and two steps differ.
    """
    hosts = expand_hosts(variables["SLURM_STEP_NODELIST"])
    job, step = int(variables["SLURM_JOB_ID"]), int(variables["SLURM_STEP_ID"])
    address = hosts[0] if len(hosts) > 1 else "127.0.0.1"
    port = PORTS[(job * 7 + step) % len(PORTS)]
    tasks = list(_tasks_per_node(variables["SLURM_STEP_TASKS_PER_NODE"]))
    return {
        "RANK": variables["SLURM_PROCID"],
        "WORLD_SIZE": variables["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": variables["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks[int(variables.get("SLURM_NODEID", "0"))]),
        "MASTER_ADDR": variables.get("MASTER_ADDR", address),
        "MASTER_PORT": variables.get("MASTER_PORT", str(port)),
    }


def expand_hosts(text: str) -> list[str]:
    """The hosts of SLURM's short form: `gpu[01-03,7],login1` is gpu01, gpu02, gpu03, gpu7, login1.

    Several brackets multiply: `r[1-2]n[1-2]` is r1n1, r1n2, r2n1, r2n2.
    """
    return [host for part in _split_outside_brackets(text) for host in _expand(part)]


def _split_outside_brackets(text: str) -> list[str]:
    return [part for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text) if part.strip()]


def _expand(part: str) -> Iterator[str]:
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)$", part.strip())
    if match is None:
        yield part.strip()
        return
    before, inside, after = match.groups()
    ends = list(_expand(after)) if after else [""]
    for numbers in inside.split(","):
        first, _, last = numbers.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield from (f"{before}{number:0{len(first)}d}{end}" for end in ends)


def _tasks_per_node(text: str) -> Iterator[int]:
    """`2(x3),1` is 2, 2, 2, 1."""
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        assert match is not None, text
        yield from [int(match[1])] * int(match[2] or 1)
