"""Checks that all ranks of a run make together: collectives, clocks, and the storage of its run folder."""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from forge_core.parallel.mesh import global_rank
from forge_plugin_plan.doctor.file_system import CHECKS, OTHER_FOLDER, SKEW_S, file_system_of, guarded
from forge_plugin_plan.doctor.rank import COLLECTIVES, library_of, tried
from forge_plugin_plan.doctor.ranks import collective_result
from forge_plugin_plan.doctor.results import Result, State, failed, not_run, ok, warning

ROUNDS = 9
"""Readings of the clocks, of which the median counts."""
VISIBLE_S = 10.0
"""Seconds in which a file that one machine wrote must be seen by all others."""
SOON_S = 1.0
"""Seconds after which that is slow."""
WORST = (State.FAILED, State.NOT_RUN, State.WARNING, State.OK)


@frozen(kw_only=True)
class World:
    """The ranks of a run, from the place of one of them."""

    rank: int
    hosts: tuple[str, ...]
    """Name of the machine of each rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @property
    def firsts(self) -> Mapping[str, int]:
        """The first rank of each machine, which speaks for it."""
        return {host: self.hosts.index(host) for host in dict.fromkeys(self.hosts)}

    def of_each_host(self, values: Sequence[Any]) -> Mapping[str, Any]:
        """Values of the ranks -> the value of the first rank of each machine."""
        return {host: values[rank] for host, rank in self.firsts.items()}


def join() -> World:
    """Returns the ranks of the process group. Collective."""
    return World(rank=global_rank(), hosts=tuple(gathered(socket.gethostname())))


def gathered(value: Any) -> list[Any]:
    """Returns the values of all ranks, in order. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_collectives(world: World, device: torch.device) -> Iterator[tuple[str, Result]]:
    """Yields whether what all ranks compute together is right, with latency and bandwidth. Collective."""
    if world.size == 1:
        yield "ranks", not_run("collectives", "a rank alone has nobody to talk to")
        return
    # Forge's own groups have both backends where there is a GPU: state is exchanged by gloo
    backends = [("gloo", torch.device("cpu"))]
    if library := library_of(device.type):
        backends.append((library, device))
    for backend, place in backends:
        for name in COLLECTIVES:
            of_ranks = gathered(tried(backend, name, place, world.rank, world.size))
            yield "ranks", collective_result(f"{backend}: {name}", of_ranks, world.size)


def check_clocks(world: World) -> Iterator[tuple[str, Result]]:
    """Yields whether the clocks of all machines agree. Collective."""
    readings = []
    for _ in range(ROUNDS):
        # All ranks leave a sum at the same time, but for the latency of the network
        dist.all_reduce(torch.zeros(1))
        readings.append(time.time())
    times = world.of_each_host(gathered(readings))
    own = next(iter(times.values()))
    offsets = {
        host: statistics.median(other - first for other, first in zip(each, own, strict=True))
        for host, each in times.items()
    }
    early, late = min(offsets, key=lambda host: offsets[host]), max(offsets, key=lambda host: offsets[host])
    apart = offsets[late] - offsets[early]
    if len(offsets) == 1:
        yield "clocks", ok("clocks", f"all ranks are on {early}")
    elif apart > SKEW_S:
        seen = f"{late} is {apart:.3f} s ahead of {early}"
        yield "clocks", warning("clocks", seen, "synchronise the clocks of all machines (chrony, NTP)")
    else:
        yield "clocks", ok("clocks", f"{len(offsets)} machines are within {apart:.3f} s of each other")


def check_storage(world: World, folder: Path) -> Iterator[tuple[str, Result]]:
    """Yields whether the run folder is one and the same on all machines, and does what checkpoints need. Collective."""
    trial = folder / "doctor"
    is_first = world.rank in world.firsts.values()
    own = trial / str(world.rank)
    if is_first:
        own.mkdir(parents=True, exist_ok=True)
        # In the way in which checkpoints are published: written under another name, synced, renamed
        unfinished = own / "from.tmp"
        unfinished.write_text(world.hosts[world.rank])
        with unfinished.open() as file:
            os.fsync(file.fileno())
        unfinished.rename(own / "from")
    gathered(None)  # after which every file is there
    seen = world.of_each_host(gathered(_seconds_until_seen(world, trial) if is_first else None))
    yield "storage", _one_folder(world, folder, seen)
    results = [guarded(name, own, check) for name, check in CHECKS.items()] if is_first else []
    every = world.of_each_host(gathered(results))
    for number in range(len(CHECKS)):
        yield "storage", _worst({host: each[number] for host, each in every.items()})
    gathered(None)  # before which no rank may remove what another one looks at
    if world.rank == 0:
        shutil.rmtree(trial)


def _seconds_until_seen(world: World, trial: Path) -> float | str:
    """Returns after how many seconds the files of all machines are here; or the machine whose file never comes."""
    started = time.monotonic()
    for host, rank in world.firsts.items():
        path = trial / str(rank) / "from"
        while not (path.is_file() and path.read_text() == host):
            if time.monotonic() - started > VISIBLE_S:
                return host
            time.sleep(0.05)
    return time.monotonic() - started


def _one_folder(world: World, folder: Path, seen: Mapping[str, float | str]) -> Result:
    machines = f"{len(world.firsts)} machine{'s' if len(world.firsts) > 1 else ''}"
    blind = {host: other for host, other in seen.items() if isinstance(other, str)}
    if blind:
        host, other = next(iter(blind.items()))
        mend = "mount the storage of run folders at the same path on all machines: job.output"
        return failed("one folder", f"{host} does not see in {folder} what {other} wrote", mend)
    slowest = max(float(each) for each in seen.values())
    where = f"{folder}, {file_system_of(folder.absolute())}: what each of {machines} wrote, all others read"
    if slowest > SOON_S:
        mend = "look for attribute caches of the mount (NFS: actimeo), by which checkpoints are found late"
        return warning("one folder", f"{where} after {slowest:.1f} s", mend)
    return ok("one folder", where)


def _worst(of_hosts: Mapping[str, Result]) -> Result:
    """Returns the result of the machine with the worst state; with its name, unless it speaks for all."""
    host = min(of_hosts, key=lambda each: WORST.index(of_hosts[each].state))
    result = of_hosts[host]
    if result.state is State.OK:
        return result
    return Result(result.name, result.state, f"{host}: {result.seen}", result.mend or OTHER_FOLDER)
