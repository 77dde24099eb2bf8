"""Where the time went, by traces whose answer is known."""

from __future__ import annotations

import pytest
import torch
from profile_traces import cpu_trace, gpu_trace
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from forge_plugin_profile.breakdown import breakdown, collective_name
from forge_plugin_profile.comparison import compare
from forge_plugin_profile.gap import gaps
from forge_plugin_profile.operator_flops import operator_flops
from forge_plugin_profile.report import report
from forge_plugin_profile.trace import trace_of
from forge_testing.refusals import lacks

US = 1e-6


@pytest.fixture(scope="module")
def on_gpu():
    return breakdown(trace_of(gpu_trace()))


@pytest.fixture(scope="module")
def on_cpu():
    return breakdown(trace_of(cpu_trace()))


def rows(facts, table, *columns, by="name"):
    return {row[by]: tuple(pytest.approx(row[column] / US) for column in columns) for row in facts[table]}


def test_a_gpu_is_idle_where_no_stream_works(on_gpu):
    assert on_gpu["on_gpu"]
    assert (on_gpu["rank"], on_gpu["steps"]) == (3, 2)
    assert on_gpu["step_s"] == pytest.approx(1750 / 2 * US)  # from the first kernel to the last
    assert on_gpu["idle"] == pytest.approx((1750 - 2 * 650) / 1750)


def test_communication_is_hidden_where_another_stream_computes(on_gpu):
    assert on_gpu["busy_s"] == {"compute": pytest.approx(600 * US), "communication": pytest.approx(200 * US), "copy": 0}
    assert on_gpu["exposed_s"] == pytest.approx(50 * US)
    [row] = on_gpu["collectives"]
    assert (row["kind"], row["phase"], row["block"], row["times"]) == ("all-gather", "forward", "layers.1", 1)
    assert row["exposed_s"] == pytest.approx(50 * US)
    text = report([{**on_gpu, "collectives": [row, {**row, "block": "layers.0", "exposed_s": 10 * US}]}])
    assert not lacks(text, "all-gather in forward", "0.06 ms of 0.4 ms", "layers.1")


def test_kernels_count_for_the_layer_of_their_launch_and_in_backward_of_the_forward_operator(on_gpu):
    times = rows(on_gpu, "layers", "forward_s", "backward_s", "communication_s")
    assert times == {"layers.0": (200, 140, 0), "layers.1": (100, 60, 200)}
    assert rows(on_gpu, "parts", "forward_s", "backward_s") == {"ffn": (200, 140)}


def test_phases_have_the_time_of_the_host_and_what_it_launched(on_gpu):
    assert rows(on_gpu, "phases", "host_s", "compute_s", "communication_s", "exposed_s") == {
        "data": (100, 0, 0, 0),
        "forward": (420, 300, 200, 50),
        "backward": (180, 200, 0, 0),
        "optimizer": (250, 100, 0, 0),
    }


def test_the_layer_furthest_from_its_bound_is_named(on_gpu):
    assert [row["bound_s"] for row in on_gpu["layers"]] == [pytest.approx(40 * US), pytest.approx(10 * US)]
    assert [(gap.layer, pytest.approx(gap.seconds / US)) for gap in gaps(on_gpu["layers"])] == [
        ("layers.0", 300),
        ("layers.1", 150),
    ]
    assert not lacks(report([on_gpu]), "**layers.0**", "0.34 ms", 8.5)


def test_without_a_peak_layers_are_measured_by_each_other(on_gpu):
    layers = [{**row, "bound_s": None} for row in on_gpu["layers"]]  # 340 and 160 µs for 4 and 1 MFLOP
    [first, second] = gaps(layers)
    assert first.layer == "layers.1"
    assert (first.measured, first.expected) == (pytest.approx(160 * US), pytest.approx(100 * US))
    assert (second.layer, second.seconds) == ("layers.0", pytest.approx(-60 * US))


def test_on_a_cpu_threads_of_the_backend_communicate_and_waits_are_no_compute(on_cpu):
    assert on_cpu["step_s"] == pytest.approx(1000 * US)
    assert on_cpu["busy_s"]["compute"] == pytest.approx(305 * US)
    assert on_cpu["busy_s"]["communication"] == pytest.approx(200 * US)
    assert on_cpu["exposed_s"] == pytest.approx(150 * US)
    assert on_cpu["idle"] == pytest.approx((1000 - 455) / 1000)
    assert rows(on_cpu, "layers", "forward_s", "backward_s", "communication_s") == {
        "layers.0": (200, 100, 0),
        "outside the layers": (5, 0, 200),  # no launch says which layer a thread of gloo works for
    }
    assert rows(on_cpu, "phases", "host_s", "communication_s") == {"forward": (320, 200), "backward": (330, 60)}


def test_operators_have_their_own_time_and_flops(on_gpu, on_cpu):
    assert rows(on_gpu, "operators", "own_s")["aten::mm"] == (500,)
    own = rows(on_cpu, "operators", "own_s")
    assert own["aten::linear"] == (40,)
    assert own["autograd::engine::evaluate_function: MmBackward0"] == (180,)
    assert {row["name"]: row["flops"] for row in on_gpu["operators"]}["aten::mm"] == 4 * 2 * 10 * 20 * 50


def test_what_became_slower_is_named(on_gpu):
    slower = breakdown(trace_of(gpu_trace(slower=60)))
    text = compare(on_gpu, slower, ("before", "after"))
    assert not lacks(text, "**layers.0**", "0.34 ms", "0.4 ms")
    assert "| layers.0 | 0.34 ms |  0.4 ms |   +0.06 ms | +17.6 % |" in text
    assert not lacks(text, "0.06 ms slower", "6.9 %")
    assert "## Calls" not in text


def test_operators_that_are_called_more_often_are_listed(on_gpu):
    more = {**on_gpu, "operators": [{**row, "calls": 3 * row["calls"]} for row in on_gpu["operators"]]}
    calls = on_gpu["operators"][0]["calls"]
    rows = compare(on_gpu, more, ("before", "after")).partition("## Calls")[2]
    cells = next(row for row in rows.splitlines() if on_gpu["operators"][0]["name"] in row).split("|")
    assert [float(cell) for cell in cells[2:5]] == [calls, 3 * calls, 2 * calls]


def test_a_trace_of_any_other_program_has_what_needs_no_marks(on_gpu):
    content = gpu_trace()
    content["traceEvents"] = [e for e in content["traceEvents"] if not e["name"].startswith(("phase", "block", "part"))]
    facts = breakdown(trace_of({key: value for key, value in content.items() if key != "forge"}))
    for key in ("step_s", "idle", "busy_s", "exposed_s"):
        assert facts[key] == on_gpu[key]
    assert facts["layers"] == facts["parts"] == []
    assert report([facts]).startswith("# 2 steps, rank 3\n")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "reduce-scatter"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(x)", "all-reduce"),
        ("ncclDevKernel_SendRecv(x)", "send-recv"),
        ("gloo:all_to_all", "all-to-all"),
    ],
)
def test_collectives_are_named_by_their_kind(name, kind):
    assert collective_name(name) == kind


def test_flops_are_those_of_torchs_counter():
    a, b = torch.ones(3, 4, 5), torch.ones(3, 5, 6)
    with FlopCounterMode(display=False) as counter:
        _ = a[0] @ b[0], torch.bmm(a, b), torch.addmm(torch.ones(4, 6), a[0], b[0])
    ours = operator_flops("aten::mm", [[4, 5], [5, 6]]) + operator_flops("aten::bmm", [[3, 4, 5], [3, 5, 6]])
    ours += operator_flops("aten::addmm", [[4, 6], [4, 5], [5, 6], [], []])
    assert ours == counter.get_total_flops()
    q, k, v = [2, 4, 7, 8], [2, 4, 9, 8], [2, 4, 9, 6]
    name, out = "aten::_scaled_dot_product_flash_attention", [2, 4, 7, 6]
    assert operator_flops(name, [q, k, v, [], []]) == sdpa_flop_count(q, k, v)
    assert operator_flops(f"{name}_backward", [out, q, k, v, out]) == sdpa_backward_flop_count(out, q, k, v)
    assert operator_flops("aten::mm", []) == 0, "without shapes"
