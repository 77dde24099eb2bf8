"""Where the time of a step goes, by operator and by kernel; and what `[hooks.profile]` makes of it."""

from __future__ import annotations

import json
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gpu.bench import Bench, piece
from gpu.runs import decoder, experts, load, merged, steps_of, train

LONGEST = 25
"""Rows of a table."""


@piece("profile", "time of a step by operator, dense and with experts", checks=False)
def profiling(bench: Bench) -> None:
    for name in ("dense", "8 experts"):
        sections = decoder(bench)
        if name != "dense":
            sections["model"]["ffn"] = experts(8, 2, bench.size(1408, 64))
        _profile(bench, name, sections)


@piece("profile-hook", "[hooks.profile]: each layer has its kernels, a snapshot of memory", ["forge-plugin-profile"])
def profile_hook(bench: Bench) -> None:
    for name, parallel in (("plain", {}), ("compiled, fsdp of one", {"compile": {}, "fsdp": {}})):
        with bench.case(name):
            _hook(bench, name, parallel if bench.on_gpu else {})


def _hook(bench: Bench, name: str, parallel: dict[str, Any]) -> None:
    hook = {"start": 4, "steps": 2, "memory": True, "snapshot": bench.on_gpu}
    changes = {"train": {"steps": 5}, "hooks": {"profile": hook}, "checkpoint": {"interval": 0}, "parallel": parallel}
    sections = merged(decoder(bench), {**changes, "job": {"name": name.replace(", ", "-").replace(" ", "-")}})
    folder = train(load(bench, sections)).folder / "profile" / "step-4"
    [facts] = json.loads((folder / "profile.json").read_text())["ranks"]
    layers = [row for row in facts["layers"] if row["name"].startswith("layers.")]
    bench.check(facts["on_gpu"] == bench.on_gpu, f"{name}: no kernels are in the trace")
    bench.check(len(layers) == sections["model"]["layers"], f"{name}: the trace has {len(layers)} layers")
    for row in layers:
        times = row["forward_s"], row["backward_s"]
        bench.check(min(times) > 0, f"{name}: {row['name']} computes for {times} s, forward and backward")
    bench.check(facts["allocated_gb"] > 0, f"{name}: no allocation is in the trace")
    if bench.on_gpu:
        bench.check((folder / "rank-0.memory.pickle").stat().st_size > 0, f"{name}: there is no snapshot")
    measured = {"ms": facts["step_s"] * 1e3, "idle": facts["idle"], "peak_gb": facts["peak_memory_gb"]}
    bench.row("a step, recorded", job=name, **measured, phases=len(facts["phases"]))


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
