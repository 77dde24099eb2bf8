"""A world of ranks of which only this process exists; its collectives send nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from attrs import define, field, frozen
from torch.distributed.device_mesh import DeviceMesh

from forge_core.contracts.errors import ForgeError
from forge_kit.nn.mesh import place_of
from forge_plugin_plan.torch_internals import FakeStore, forget_sharding, without_vote

NODE = 8
"""GPUs of a node; ranks are numbered node by node."""


@define
class BroadcastLog:
    """Objects that ranks broadcast, in order. Objects of a simulated rank reach the ranks that are simulated later."""

    broadcasts: list[Any] = field(factory=list)


@contextmanager
def fake_world(size: int, rank: int, log: BroadcastLog, pipelined: bool) -> Iterator[None]:
    """Within this context, this process is rank `rank` of `size`, of a pipeline if `pipelined`.

    Raises:
        ForgeError: the process is part of a real world.
    """
    if dist.is_initialized():
        raise ForgeError("a plan needs a separate process: this one already has a process group")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    # A copy: what this rank broadcasts is appended to the log, and is not for itself
    received = iter(tuple(log.broadcasts))

    def broadcast(objects: list[Any], src: int | None = None, group: Any = None, *_: Any, **more: Any) -> None:
        source = more.get("group_src")
        source = src if source is None else dist.get_global_rank(group, source)
        if source == rank:
            log.broadcasts.append(list(objects))
        else:
            objects[:] = next(received)

    def gather(gathered: list[Any], value: Any, group: Any = None) -> None:
        # There are no values of other ranks; all are taken to be equal
        gathered[:] = [value] * dist.get_world_size(group)

    try:
        with (
            # Objects would have to come from ranks that do not exist; the backend handles tensors alone
            patch.object(dist, "broadcast_object_list", broadcast),
            patch.object(dist, "all_gather_object", gather),
            without_vote() if pipelined else nullcontext(),
        ):
            yield
    finally:
        dist.destroy_process_group()
        forget_sharding()


@frozen
class Line:
    """Ranks that communicate, as the mesh arranges them."""

    dimension: str
    """The mesh dimension along which they differ; several joined by ` x `."""
    ranks: int
    per_node: int
    """Ranks of them that share a node, on the node that has fewest."""

    @property
    def in_node(self) -> bool:
        return self.per_node == self.ranks

    def __str__(self) -> str:
        where = "" if self.in_node else f", {self.per_node} a node"
        return f"{self.dimension} ({self.ranks} ranks{where})"


def line_of(group: dist.ProcessGroup, mesh: DeviceMesh) -> Line:
    """Returns how the ranks of a group are arranged in the mesh and on nodes."""
    ranks = dist.get_process_group_ranks(group)
    places = [place_of(rank, mesh) for rank in ranks]
    varying = [name for name in places[0] if len({place[name] for place in places}) > 1]
    return Line(" x ".join(varying) or "none", len(ranks), _fewest_on_a_node(ranks))


def _fewest_on_a_node(ranks: Sequence[int]) -> int:
    nodes = [rank // NODE for rank in ranks]
    return min(nodes.count(node) for node in set(nodes))
