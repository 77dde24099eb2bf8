"""Environment `slurm`: the tasks of a step, which srun starts, are ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import frozen

from forge_core import Environment

PORTS = range(20000, 32000)
"""Ports for the steps of SLURM, below those that Linux takes for outgoing connections."""


@frozen(kw_only=True)
class SlurmStep(Environment):
    """The tasks of a SLURM step, if there are several. Rank 0 is on its first host."""

    def rank(self, variables: Mapping[str, str]) -> Mapping[str, str]:
        """The variables of a rank; `MASTER_ADDR` and `MASTER_PORT` that are set already have precedence."""
        return _rank_of_step(variables) if is_rank_of_step(variables) else {}

    def warning(self, variables: Mapping[str, str]) -> str:
        """Of a batch script without srun, which trains on one of its tasks and pays for all."""
        if (tasks := tasks_of_shell(variables)) == 1:
            return ""
        shell = f"SLURM has allotted {tasks} tasks, and this is the shell of the job, which is one process"
        return f"{shell}; `srun forge-run …` makes each task a rank"


def is_rank_of_step(variables: Mapping[str, str]) -> bool:
    """Whether this process is one of several tasks of a SLURM step, which srun starts: only those are ranks."""
    # A batch script and the shell of salloc have SLURM_NTASKS too, and the former even SLURM_PROCID, but no variable of
    # a step. A step of one task, such as `srun --pty bash`, is a shell like any other
    several = variables.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    return several and "SLURM_STEP_ID" in variables and "SLURM_PROCID" in variables


def tasks_of_shell(variables: Mapping[str, str]) -> int:
    """Tasks that were allotted to a batch script or a `salloc` shell, which runs none of them itself; else 1."""
    return 1 if "SLURM_STEP_ID" in variables else int(variables.get("SLURM_NTASKS", "1"))


def _rank_of_step(variables: Mapping[str, str]) -> dict[str, str]:
    tasks = _tasks_per_node(variables["SLURM_STEP_TASKS_PER_NODE"])
    # srun puts task 0 on the first host by default. On one host loopback needs no name to be resolved
    address = first_host(variables["SLURM_STEP_NODELIST"]) if len(tasks) > 1 else "127.0.0.1"
    # The tasks cannot talk yet, so the port follows from numbers that all of them know, and that two steps do not share
    port = PORTS[(int(variables["SLURM_JOB_ID"]) * 7 + int(variables["SLURM_STEP_ID"])) % len(PORTS)]
    return {
        "RANK": variables["SLURM_PROCID"],
        "WORLD_SIZE": variables["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": variables["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks[int(variables.get("SLURM_NODEID", "0"))]),
        "MASTER_ADDR": variables.get("MASTER_ADDR", address),
        "MASTER_PORT": variables.get("MASTER_PORT", str(port)),
        Environment.OWN_DEVICES: "1",  # a step may show each task its own GPUs only
    }


def first_host(short: str) -> str:
    """The first host of SLURM's short form: gpu01 of `gpu[01-03,7],login1`, r1n1 of `r[1-2]n[1-2]`."""
    first = re.split(r",(?![^\[]*\])", short)[0].strip()
    return re.sub(r"\[([^\]\-,]*)[^\]]*\]", r"\1", first)


def _tasks_per_node(text: str) -> list[int]:
    """`2(x3),1` is 2, 2, 2, 1."""
    return [int(tasks) for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(nodes or 1))]
