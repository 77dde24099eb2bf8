"""Lower bounds on the time of a step, from the data sheet of a GPU."""

from __future__ import annotations

from attrs import frozen

from forge_plugin_plan import units
from forge_plugin_plan.fake_world import Line
from forge_plugin_plan.gpus import GPU
from forge_plugin_plan.simulate import RankPlan, Traffic


@frozen(kw_only=True)
class Bound:
    """A lower bound on the time of a step."""

    what: str
    seconds: float
    how: str
    """The arithmetic."""


def bounds(rank: RankPlan, gpu: GPU, network: float) -> list[Bound]:
    """Returns the lower bounds on the step of a rank that could be simulated.

    Args:
        rank: the rank's figures.
        gpu: data sheet of its GPU.
        network: bytes a second and direction from each GPU to other nodes.
    """
    assert rank.traffic is not None
    traffic, passed = rank.traffic, _through_memory(rank)
    compute = Bound(
        what="compute",
        seconds=traffic.flops / gpu.flops,
        how=f"{traffic.flops / 1e12:,.1f} TFLOP at {gpu.flops / 1e12:,.0f} TFLOP/s (bf16)",
    )
    memory = Bound(
        what="memory",
        seconds=passed / gpu.bandwidth,
        how=f"{passed / 1e9:,.1f} GB at {gpu.bandwidth / 1e9:,.0f} GB/s",
    )
    # Lines along which nothing is sent have no bound: it would be 0
    lines = {traffic.lines[transfer.group] for transfer in traffic.transfers if transfer.sent}
    return [compute, memory, *(_link(traffic, line, gpu, network) for line in sorted(lines, key=str))]


def _through_memory(rank: RankPlan) -> int:
    """Returns bytes that pass through memory at least."""
    # Saved tensors are written and read; the update reads and writes weights and its state, and reads gradients.
    assert rank.traffic is not None
    return 2 * rank.traffic.kept + 2 * (rank.weights + rank.optimizer) + rank.gradients


def _link(traffic: Traffic, line: Line, gpu: GPU, network: float) -> Bound:
    # Rings of ranks that share nodes leave a node by as many adapters as they have ranks there. In an all-to-all each
    # rank sends to the ranks of other nodes by its own adapter.
    rings, exchanged = sent_along(traffic, line, exchanges=False), sent_along(traffic, line, rings=False)
    if line.in_node:
        sent = rings + exchanged
        how = f"{units.size(sent)} at {gpu.link / 1e9:,.0f} GB/s, within a node"
        return Bound(what=str(line), seconds=sent / gpu.link, how=how)
    # A ring also passes between the GPUs of each node, whose links may be slower than all adapters together
    rate = min(gpu.link, network * line.per_node)
    # An all-to-all sends equally much to each other rank; only the ranks on other nodes need the network
    leaving = exchanged * (line.ranks - line.per_node) / (line.ranks - 1)
    parts = []
    if rings:
        parts.append(f"{units.size(rings)} at {rate / 1e9:,.0f} GB/s")
    if leaving:
        parts.append(f"{units.size(leaving)} to other nodes at {network / 1e9:,.0f} GB/s")
    how = f"{' and '.join(parts)}, over the network"
    return Bound(what=str(line), seconds=rings / rate + leaving / network, how=how)


def sent_along(traffic: Traffic, line: Line, *, rings: bool = True, exchanges: bool = True) -> float:
    """Returns the bytes that the rank sends along a line, in all-to-alls (`exchanges`) and all else (`rings`)."""
    return sum(
        transfer.sent * times
        for transfer, times in traffic.transfers.items()
        if traffic.lines[transfer.group] == line and (exchanges if transfer.kind == "all-to-all" else rings)
    )
