"""Where the time of a step goes, by operator and by kernel."""

from __future__ import annotations

from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gpu.bench import Bench, piece
from gpu.runs import decoder, experts, load, steps_of

LONGEST = 25
"""Rows of a table."""


@piece("profile", "time of a step by operator, dense and with experts", checks=False)
def profiling(bench: Bench) -> None:
    for name in ("dense", "8 experts"):
        sections = decoder(bench)
        if name != "dense":
            sections["model"]["ffn"] = experts(8, 2, bench.size(1408, 64))
        _profile(bench, name, sections)


def _profile(bench: Bench, name: str, sections: dict[str, Any]) -> None:
    count = bench.size(3, 1)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.on_gpu else [])]
    with steps_of(load(bench, sections)) as steps:
        for _ in range(bench.size(4, 1)):
            steps()
        bench.synchronize()
        with profile(activities=activities) as recorded:
            for _ in range(count):
                steps()
            bench.synchronize()
    # An operator's own device time is that of the kernels that it starts, which are events too.
    events = recorded.key_averages()
    operators = [event for event in events if event.device_type == DeviceType.CPU]
    _table(bench, f"{name}: operators", operators, count)
    if bench.on_gpu:
        _table(bench, f"{name}: kernels", [event for event in events if event not in operators], count)
        calls = [event for event in operators if event.key.startswith(("cuda", "aten::_local_scalar_dense"))]
        _table(bench, f"{name}: calls of CUDA by the host", calls, count, host=True)


def _table(bench: Bench, title: str, events: Any, steps: int, host: bool = False) -> None:
    host = host or not bench.on_gpu

    def own(event: Any) -> float:
        return float(event.self_cpu_time_total if host else event.self_device_time_total)

    total = sum(map(own, events)) or 1.0
    for event in sorted(events, key=own, reverse=True)[:LONGEST]:
        if own(event):
            cells = {"ms_a_step": own(event) / steps / 1e3, "share": own(event) / total}
            bench.row(title, operator=event.key[:90], **cells, calls_a_step=event.count / steps)
