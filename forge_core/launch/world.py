"""Which rank this process is, by the variables of its launcher: our own, torchrun, or SLURM."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_core.launch.slurm import is_rank_of_step, rank_of_step

CONTROL = "FORGE_LAUNCHER_FD"
"""Variable that our launcher sets: the descriptor of the socket between it and a rank."""

LISTENING = "FORGE_LISTENING_FD"
"""Variable that our launcher sets for rank 0: the descriptor of the socket at which it is to serve the store."""

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets, as does our own launcher."""


@frozen(kw_only=True)
class World:
    """This process among those of its run."""

    rank: int = 0
    size: int = 1
    address: str = "127.0.0.1"
    """Host of rank 0."""
    port: int = 0

    @property
    def alone(self) -> bool:
        return self.size == 1


def join_world(environment: MutableMapping[str, str] | None = None) -> World:
    """The world that the environment describes. Copies the variables of SLURM to the names that torch knows (`RANK`,
    `LOCAL_RANK`, …).

    Raises:
        JobError: the variables contradict each other, or some are missing.
    """
    variables = os.environ if environment is None else environment
    if "RANK" not in variables and is_rank_of_step(variables):
        variables.update(rank_of_step(variables))
    if "RANK" not in variables:
        if variables.get("WORLD_SIZE", "1") != "1":
            message = f"WORLD_SIZE is {variables['WORLD_SIZE']}, but RANK is not set"
            raise JobError(f"{message}; start the ranks with --nproc, torchrun or srun, or unset WORLD_SIZE")
        return World()
    return _read(variables)


def _read(variables: Mapping[str, str]) -> World:
    size = _number(variables, "WORLD_SIZE")
    missing = [name for name in NEEDED if name not in variables]
    if size > 1 and missing:
        raise JobError(f"of {', '.join(NEEDED)}, which tell a rank of its run, {' and '.join(missing)} are not set")
    world = World(
        rank=_number(variables, "RANK"),
        size=size,
        address=variables.get("MASTER_ADDR", "127.0.0.1"),
        port=_number(variables, "MASTER_PORT", 0),
    )
    if not 0 <= world.rank < world.size:
        raise JobError(f"RANK is {world.rank} and WORLD_SIZE {world.size}; ranks are 0 to {world.size - 1}")
    return world


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = variables.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(value or "")
    except ValueError:
        raise JobError(f"the variable {name} is {value!r}; it must be a whole number") from None
