"""How long a collective takes at least: NCCL's own model of the latency and bandwidth of its algorithms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import frozen

from forge_plugin_plan.fake_world import Line
from forge_plugin_plan.meter import Transfer


@frozen
class Protocol:
    """One of NCCL's ways to send, with an algorithm. Latencies are in microseconds."""

    base: float
    """Of every call."""
    link: float
    """Of each step between GPUs of a node."""
    network: float
    """Of each step between nodes."""
    efficiency: float
    """Fraction of the bandwidth that carries data; the rest are flags."""
    across_nodes: bool = True
    overhead: float = 1.0
    """Least latency of a step within a node if the collective also leaves it."""


RING: Mapping[str, Protocol] = {
    "low latency": Protocol(6.6, 0.6, 2.7, 0.5),
    "128 bytes": Protocol(14.0, 1.9, 4.0, 120 / 128, across_nodes=False),
    "simple": Protocol(8.4, 3.4, 14.0, 1.0, overhead=3.0),
}
TREE: Mapping[str, Protocol] = {
    "low latency": Protocol(6.8, 0.6, 5.0, 1 / 3.8),
    "128 bytes": Protocol(14.0, 1.25, 8.5, 7 / 9, across_nodes=False),
    "simple": Protocol(8.4, 4.0, 14.0, 0.92, overhead=3.0),
}
"""Constants of NCCL's `tuning.cc` (`ncclTunerConstantsDefaults`); torch's `_inductor/comm_analysis.py` has them too."""
RING_STEPS: Mapping[str, int] = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
"""Times that data pass all other ranks of a ring."""


def seconds(transfer: Transfer, line: Line, rate: float) -> float:
    """Returns the time of a collective or message by the fastest algorithm and protocol.

    Args:
        transfer: the collective.
        line: arrangement of its ranks.
        rate: bytes a second that a rank can send along the line.
    """
    return min(latency + sent / rate for latency, sent in _ways(transfer, line))


def latency(transfer: Transfer, line: Line) -> float:
    """Returns the seconds that the collective takes at least without any bytes."""
    return min(wait for wait, _ in _ways(transfer, line))


def _ways(transfer: Transfer, line: Line) -> Iterator[tuple[float, float]]:
    """Yields latency, in seconds, and bytes with those for flags, of each algorithm and protocol."""
    nodes = -(-line.ranks // line.per_node)  # the last one may have fewer ranks
    for protocol in RING.values():
        if nodes == 1 or protocol.across_nodes:
            yield 1e-6 * _ring_latency(protocol, transfer.kind, line.ranks, nodes), transfer.sent / protocol.efficiency
    if transfer.kind == "all-reduce":
        for protocol in TREE.values():
            if nodes == 1 or protocol.across_nodes:
                # A tree sends half of its bandwidth up and half down, and each rank the whole tensor in both directions
                yield 1e-6 * _tree_latency(protocol, line.ranks, nodes), 2 * transfer.whole / protocol.efficiency


def _ring_latency(protocol: Protocol, kind: str, ranks: int, nodes: int) -> float:
    if kind not in RING_STEPS:
        # Messages, of which those of an all-to-all are on their way together, and broadcasts, which are pipelined
        return protocol.base + (protocol.network if nodes > 1 else protocol.link)
    steps, between = RING_STEPS[kind] * (ranks - 1), RING_STEPS[kind] * (nodes - 1)
    return protocol.base + (steps - between) * _link(protocol, nodes) + between * protocol.network


def _tree_latency(protocol: Protocol, ranks: int, nodes: int) -> float:
    levels = (nodes - 1).bit_length() if nodes & (nodes - 1) == 0 else nodes.bit_length() - 1
    return protocol.base + 2 * ((ranks // nodes - 1) * _link(protocol, nodes) + levels * protocol.network)


def _link(protocol: Protocol, nodes: int) -> float:
    return max(protocol.link, protocol.overhead if nodes > 1 else 0.0)
