"""Which rank this process is, by the variables of its launcher: our own, torchrun, or SLURM."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

from attrs import frozen

from forge_core.contracts.errors import JobError

CONTROL = "FORGE_LAUNCHER_FD"
"""Variable that our launcher sets: the descriptor of the socket between it and a rank."""
ALIVE = b"."
"""What a rank sends to our launcher once its work is done, again each second until it exits."""
LISTENING = "FORGE_LISTENING_FD"
"""Variable that our launcher sets for rank 0: the descriptor of the socket at which it is to serve the store."""
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PORTS = range(20000, 32000)
"""Ports for the steps of SLURM, below those that Linux takes for outgoing connections."""


@frozen(kw_only=True)
class World:
    """This process among the processes of its run."""

    rank: int = 0
    size: int = 1
    address: str = "127.0.0.1"
    """Host of rank 0."""
    port: int = 0

    @property
    def alone(self) -> bool:
        return self.size == 1


def join_world(environment: MutableMapping[str, str] | None = None) -> World:
    """Read the world from the environment; a `JobError` names variables that contradict each other or are missing.

    Variables of SLURM are copied to the names that torch reads (`RANK`, `LOCAL_RANK`, …).
    """
    variables = os.environ if environment is None else environment
    # RANK first: SLURM's numbers are not the ranks' under torchrun in a step, where a task has several of them
    if "RANK" not in variables and is_rank_of_step(variables):
        variables.update(_rank_of_step(variables))
    if "RANK" not in variables:
        if variables.get("WORLD_SIZE", "1") != "1":
            raise JobError(
                f"WORLD_SIZE is {variables['WORLD_SIZE']}, but RANK is not set; "
                "start the ranks with --nproc, torchrun or srun, or unset WORLD_SIZE"
            )
        return World()
    size = _number(variables, "WORLD_SIZE")
    missing = [name for name in NEEDED if name not in variables]
    if size > 1 and missing:
        raise JobError(f"of {', '.join(NEEDED)}, which tell a rank of its run, {' and '.join(missing)} are not set")
    address, port = variables.get("MASTER_ADDR", "127.0.0.1"), _number(variables, "MASTER_PORT", "0")
    world = World(rank=_number(variables, "RANK"), size=size, address=address, port=port)
    if not 0 <= world.rank < size:
        raise JobError(f"RANK is {world.rank} and WORLD_SIZE {size}; ranks are 0 to {size - 1}")
    return world


def _number(variables: Mapping[str, str], name: str, default: str | None = None) -> int:
    value = variables.get(name, default)
    try:
        return int(value or "")
    except ValueError:
        seen = repr(value) if value else "not set"
        raise JobError(f"the variable {name} is {seen}; it must be a whole number") from None


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
    }


def first_host(short: str) -> str:
    """The first host of SLURM's short form: gpu01 of `gpu[01-03,7],login1`, r1n1 of `r[1-2]n[1-2]`."""
    first = re.split(r",(?![^\[]*\])", short)[0].strip()
    return re.sub(r"\[([^\]\-,]*)[^\]]*\]", r"\1", first)


def _tasks_per_node(text: str) -> list[int]:
    """`2(x3),1` is 2, 2, 2, 1."""
    return [int(tasks) for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(nodes or 1))]
