"""Bounds on the time of a step: latency of collectives, launches of kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from forge_plugin_plan import collectives
from forge_plugin_plan.bounds import bounds
from forge_plugin_plan.fake_world import Line
from forge_plugin_plan.gpus import GPUS
from forge_plugin_plan.machine import LAUNCH_S, Machine
from forge_plugin_plan.meter import Meter, Transfer
from forge_plugin_plan.simulate import Traffic

H100 = Machine.of_data_sheet(GPUS["h100"], 50e9)
comm_analysis: Any = pytest.importorskip("torch._inductor.comm_analysis")
needs_tables = pytest.mark.skipif(
    not hasattr(comm_analysis, "_nccl_algo_time"), reason="this torch has no model of NCCL's algorithms"
)


def line_of(ranks: int, per_node: int) -> Line:
    return Line("shard", ranks, per_node)


@needs_tables
@pytest.mark.parametrize("ranks", [2, 8, 16, 64, 1024])
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter"])
def test_the_latency_of_each_algorithm_is_that_of_torchs_tables(
    kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm_analysis, "get_gpu_type", lambda: comm_analysis.NVIDIA_GPU_TYPE.HOPPER)
    monkeypatch.setattr(comm_analysis, "detect_interconnect", lambda _: comm_analysis.InterconnectType.IB_NDR)
    collective = comm_analysis.NCCL_COLL[kind.upper().replace("-", "_")]
    algorithms, protocols = comm_analysis.NCCL_ALGO, comm_analysis.NCCL_PROTO
    best = [
        time
        for algorithm in algorithms
        if algorithm == algorithms.RING or kind == "all-reduce"
        for protocol in protocols
        if (time := comm_analysis._nccl_algo_time(0, ranks, collective, algorithm, protocol)) >= 0
    ]
    found = collectives.latency(Transfer(kind, "group", 0, ranks), line_of(ranks, min(ranks, 8)))
    assert found * 1e6 == pytest.approx(min(best))


def test_a_large_collective_takes_its_bytes_at_full_rate_and_a_small_one_its_latency() -> None:
    line, rate = line_of(8, 8), 450e9
    large, small = (Transfer("all-gather", "group", size, 8) for size in (10**10, 1024))
    assert collectives.seconds(large, line, rate) == pytest.approx(large.sent / rate, rel=0.01)
    assert collectives.seconds(small, line, rate) == pytest.approx(collectives.latency(small, line), rel=0.01)
    assert H100.wait(small, line, rate) > 0.99 * collectives.latency(small, line)


def test_a_tree_is_faster_for_small_all_reduces_of_many_nodes() -> None:
    # A ring of 1024 ranks passes 2046 others, a tree of 128 nodes 7 levels up and 7 down
    small = Transfer("all-reduce", "group", 64, 1024)
    assert collectives.latency(small, line_of(1024, 8)) == pytest.approx((6.8 + 2 * (7 * 1.0 + 7 * 5.0)) * 1e-6)


def test_operations_that_start_a_kernel_are_counted_and_views_and_allocations_are_not() -> None:
    meter, x, layer = Meter(), torch.ones(4, 6), nn.Linear(6, 3, bias=False)
    with meter.watching(), torch.no_grad():
        torch.empty(7)
        x.t()[1:].view(-1, 2, 2)
        layer(x)  # one product
        x.add_(1).mul(2)
    assert meter.launches == 3


def test_launches_are_a_bound_unless_blocks_are_compiled() -> None:
    traffic = Traffic(transfers={}, lines={}, flops=1e9, launches=1000, kept=0)

    class Rank:
        weights = optimizer = gradients = 0
        compiled = False

    rank: Any = Rank()
    rank.traffic = traffic
    assert {bound.what: bound.seconds for bound in bounds(rank, H100)}["launches"] == pytest.approx(1000 * LAUNCH_S)
    rank.compiled = True
    assert "launches" not in {bound.what for bound in bounds(rank, H100)}
