"""Which rank this process is, by the variables of its launcher: our own, torchrun, or one of kind `environment`."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from functools import cache
from typing import Any

from attrs import frozen

from forge_core.contracts.components import Environment
from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import Catalog

CONTROL = "FORGE_LAUNCHER_FD"
"""Variable that our launcher sets: the descriptor of the socket between it and a rank."""
ALIVE = b"."
"""What a rank sends to our launcher once its work is done, again each second until it exits."""
LISTENING = "FORGE_LISTENING_FD"
"""Variable that our launcher sets for rank 0: the descriptor of the socket at which it is to serve the store."""
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@frozen(kw_only=True)
class World:
    """This process among the processes of its run."""

    rank: int = 0
    size: int = 1
    address: str = "127.0.0.1"
    """Host of rank 0."""
    port: int = 0
    spread: bool = False
    """Over several machines, of which a launcher of ours sees one."""

    @property
    def alone(self) -> bool:
        return self.size == 1


def join_world(environment: MutableMapping[str, str] | None = None) -> World:
    """Read the world from the environment; a `JobError` names variables that contradict each other or are missing.

    What an environment reads is copied to the names that torch reads (`RANK`, `LOCAL_RANK`, …).
    """
    variables = os.environ if environment is None else environment
    # RANK first: SLURM's numbers are not the ranks' under torchrun in a step, where a task has several of them
    if "RANK" not in variables:
        claims = {type_: rank for type_, each in environments().items() if (rank := each.rank(variables))}
        if len(claims) > 1:
            raise JobError(f"this is a rank of {' and of '.join(claims)}; set {', '.join(NEEDED)} to those that count")
        variables.update(*claims.values())
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
    world = World(
        rank=_number(variables, "RANK"),
        size=size,
        address=variables.get("MASTER_ADDR", "127.0.0.1"),
        port=_number(variables, "MASTER_PORT", "0"),
        spread=_number(variables, "LOCAL_WORLD_SIZE", str(size)) < size,
    )
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


@cache
def environments() -> Mapping[str, Environment]:
    """The installed environments, by type."""
    catalog = Catalog.installed()
    classes: Mapping[str, Any] = {
        each.type: catalog.load("environment", each.qualified) for each in catalog.offers("environment")
    }
    return {type_: cls() for type_, cls in classes.items()}
