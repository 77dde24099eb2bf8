"""Lower bounds on the time of a step, from what a GPU can do."""

from __future__ import annotations

from attrs import frozen

from forge_plugin_plan import units
from forge_plugin_plan.fake_world import Line
from forge_plugin_plan.machine import Machine
from forge_plugin_plan.simulate import RankPlan, Traffic


@frozen(kw_only=True)
class Bound:
    """A lower bound on the time of a step."""

    what: str
    seconds: float
    how: str
    """The arithmetic."""
    latency: float = 0.0
    """The part of the seconds that is latency of collectives."""


def bounds(rank: RankPlan, machine: Machine) -> list[Bound]:
    """Returns the lower bounds on the step of a rank that could be simulated.

    Args:
        rank: the rank's figures.
        machine: what its GPU and network can do. Kernels of compiled blocks are not counted, since the plan plays
            them uncompiled.
    """
    assert rank.traffic is not None
    traffic, passed = rank.traffic, _through_memory(rank)
    compute = Bound(
        what="compute",
        seconds=traffic.flops / machine.flops,
        how=f"{traffic.flops / 1e12:,.1f} TFLOP at {machine.flops / 1e12:,.0f} TFLOP/s ({machine.of_flops})",
    )
    memory = Bound(
        what="memory",
        seconds=passed / machine.bandwidth,
        how=f"{passed / 1e9:,.1f} GB at {machine.bandwidth / 1e9:,.0f} GB/s",
    )
    # Lines along which nothing is sent have no bound: it would be 0
    lines = {traffic.lines[transfer.group] for transfer in traffic.transfers if transfer.sent}
    links = [_link(traffic, line, machine) for line in sorted(lines, key=str)]
    return [compute, memory, *([] if rank.compiled else [_launches(traffic, machine)]), *links]


def _launches(traffic: Traffic, machine: Machine) -> Bound:
    # The host starts one kernel after another, whatever the device computes meanwhile
    how = f"{traffic.launches:,} kernels at {machine.launch * 1e6:,.1f} µs"
    return Bound(what="launches", seconds=traffic.launches * machine.launch, how=how)


def _through_memory(rank: RankPlan) -> int:
    """Returns bytes that pass through memory at least."""
    # Saved tensors are written and read; the update reads and writes weights and its state, and reads gradients.
    assert rank.traffic is not None
    return 2 * rank.traffic.kept + 2 * (rank.weights + rank.optimizer) + rank.gradients


def _link(traffic: Traffic, line: Line, machine: Machine) -> Bound:
    # Rings of ranks that share nodes leave a node by as many adapters as they have ranks there. In an all-to-all each
    # rank sends to the ranks of other nodes by its own adapter.
    rings, exchanged = sent_along(traffic, line, exchanges=False), sent_along(traffic, line, rings=False)
    link, network = machine.within_node(line), machine.network
    if line.in_node:
        rate, sent = link, rings + exchanged
        how = f"{units.size(sent)} at {link / 1e9:,.0f} GB/s, within a node"
        unhindered = sent / link
    else:
        # A ring also passes between the GPUs of each node, whose links may be slower than all adapters together
        rate = min(link, network * line.per_node)
        # An all-to-all sends equally much to each other rank; only the ranks on other nodes need the network
        leaving = exchanged * (line.ranks - line.per_node) / (line.ranks - 1)
        parts = []
        if rings:
            parts.append(f"{units.size(rings)} at {rate / 1e9:,.0f} GB/s")
        if leaving:
            parts.append(f"{units.size(leaving)} to other nodes at {network / 1e9:,.0f} GB/s")
        how = f"{' and '.join(parts)}, over the network"
        unhindered = rings / rate + leaving / network
    waited, calls, measured = _latency(traffic, line, machine, rate)
    known = f", {measured:,} of them as measured" if measured else f", {units.seconds(waited)} of latency"
    how = f"{how}; {calls:,} calls{known}"
    return Bound(what=str(line), seconds=unhindered + waited, how=how, latency=waited)


def _latency(traffic: Traffic, line: Line, machine: Machine, rate: float) -> tuple[float, int, int]:
    """Returns what calls along a line take beyond their bytes at full rate, how many there are, and were measured."""
    waited, calls, measured = 0.0, 0, 0
    for transfer, times in traffic.transfers.items():
        if traffic.lines[transfer.group] == line and transfer.sent:
            calls += times
            measured += times * bool(machine.points(transfer, line))
            waited += times * machine.wait(transfer, line, rate)
    return waited, calls, measured


def sent_along(traffic: Traffic, line: Line, *, rings: bool = True, exchanges: bool = True) -> float:
    """Returns the bytes that the rank sends along a line, in all-to-alls (`exchanges`) and all else (`rings`)."""
    return sum(
        transfer.sent * times
        for transfer, times in traffic.transfers.items()
        if traffic.lines[transfer.group] == line and (exchanges if transfer.kind == "all-to-all" else rings)
    )
