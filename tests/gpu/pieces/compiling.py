"""Compiled blocks: no graph breaks, one graph for equal blocks, and what compilation gains."""

from __future__ import annotations

from typing import Any

from gpu.bench import Bench, missing, piece
from gpu.runs import decoder, experts, load, merged, steps_of

JOBS: dict[str, dict[str, Any]] = {
    "dense": {},
    "recomputed": {"parallel": {"activation_checkpointing": {}}},
    "recomputed in part": {"parallel": {"activation_checkpointing": {"mode": "selective"}}},
    "8 experts": {},
    "8 experts, recomputed": {"parallel": {"activation_checkpointing": {"mode": "selective"}}},
    "float8": {"parallel": {"float8": {}}},
    "fsdp of one": {"parallel": {"fsdp": {}}},
}
TINY = ("8 experts, recomputed",)
"""Those of the tiny form."""


@piece("compile", "graph breaks and graphs of compiled blocks, and their speed beside uncompiled ones")
def compiling(bench: Bench) -> None:
    if bench.tiny:
        bench.notes.append("Blocks are traced and differentiated ahead of time, and no code is generated.")
    for name, changes in JOBS.items():
        if bench.tiny and name not in TINY:
            continue
        if "float8" in changes.get("parallel", {}) and missing(["torchao"]):
            bench.row("not tried", job=name, why="torchao is not installed")
            continue
        sections = merged(decoder(bench), changes)
        if "experts" in name:
            sections["model"]["ffn"] = experts(8, 2, bench.size(1408, 64))
        with bench.case(name):
            _measure(bench, name, sections)


def _measure(bench: Bench, name: str, sections: dict[str, Any]) -> None:
    import torch._dynamo
    from torch._dynamo.utils import counters

    found: dict[str, dict[str, float]] = {}
    backend = {"backend": "aot_eager"} if bench.tiny else {}
    losses = []
    for how, stages in (("eager", {}), ("compiled", {"compile": backend})):
        torch._dynamo.reset()
        counters.clear()
        with steps_of(load(bench, merged(sections, {"parallel": stages}))) as steps:
            losses.append(float(steps()[0]))
            found[how] = steps.speed(bench, bench.size(8, 1), bench.size(3, 1))
    breaks, graphs = sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]
    bench.check(breaks == 0, f"{name}: {breaks} graph breaks: {', '.join(counters['graph_break'])}")
    bench.check(graphs > 0, f"{name}: nothing was compiled")
    bench.check(abs(losses[1] / losses[0] - 1) < 1e-2, f"{name}: losses {losses} without and with compilation")
    bench.row(
        "compiled blocks",
        job=name,
        breaks=breaks,
        graphs=graphs,
        layers=sections["model"]["layers"],
        eager_ms=found["eager"]["step_ms"],
        compiled_ms=found["compiled"]["step_ms"],
        ratio=found["compiled"]["step_ms"] / found["eager"]["step_ms"],
        first_step_s=found["compiled"]["first_step_s"],
    )
