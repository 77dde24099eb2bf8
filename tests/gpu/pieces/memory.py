"""The memory of a step, against what `forge-run plan` says of the job."""

from __future__ import annotations

from typing import Any

from forge_core import Catalog
from forge_core.parallel.mesh import leave_group
from forge_plugin_parallel.memory import peak_bytes
from gpu.bench import Bench, piece
from gpu.runs import Steps, decoder, experts, load, merged, steps_of

JOBS: dict[str, dict[str, Any]] = {
    "dense": {},
    "recomputed": {"parallel": {"activation_checkpointing": {}}},
    "recomputed in part": {"parallel": {"activation_checkpointing": {"mode": "selective"}}},
    "fsdp of one": {"parallel": {"fsdp": {}}},
    "plain loss": {"loss": {"type": "cross_entropy"}},
    "8 experts": {},
    "muon": {"optimizer": {"type": "muon"}},
}
TINY = ("dense", "recomputed", "8 experts")
"""Those of the tiny form."""
LIMIT = 0.15
"""Largest difference between what is measured and the estimate, as a part of the estimate."""


@piece("memory", "peak memory of a step against the estimate of forge-run plan")
def memory(bench: Bench) -> None:
    from forge_plugin_plan.estimate import make_plan

    if not bench.on_gpu:
        bench.notes.append("Allocations of torch's operations in the place of the CUDA allocator's.")
    names = [name for name in JOBS if not bench.tiny or name in TINY]
    jobs = {name: load(bench, _sections(bench, name)) for name in names}
    leave_group()  # a plan makes a world of its own, so all plans come before the first run
    plans = {name: make_plan(job, Catalog.installed(), 1) for name, job in jobs.items()}
    for name, job in jobs.items():
        estimate = plans[name].fullest.memory
        if estimate is None:
            bench.check(False, f"{name}: the plan cannot play the step: {plans[name].fullest.failure}")
            continue
        with bench.case(name), steps_of(job) as steps:
            measured = _measured(bench, steps)
            error = abs(measured - estimate.peak) / estimate.peak
            # What libraries take for themselves outweighs a tiny model on a GPU.
            limit = 10.0 if bench.tiny and bench.on_gpu else LIMIT
            bench.within("peak memory, GB", error, limit, job=name, plan=estimate.peak / 1e9, measured=measured / 1e9)


def _sections(bench: Bench, name: str) -> dict[str, Any]:
    sections = merged(decoder(bench), JOBS[name])
    if name == "8 experts":
        sections["model"]["ffn"] = experts(8, 2, bench.size(1408, 64))
    return sections


def _measured(bench: Bench, steps: Steps) -> int:
    """The peak of a step that comes after others."""
    steps()
    if bench.on_gpu:
        bench.reset_peak()
        steps()
        peak = bench.peak_bytes()
        assert peak is not None
        return peak
    kept = [item.parameter for item in steps.run.parameters]
    kept += [t for state in steps.run.optimizer.state.values() for t in state.values() if hasattr(t, "numel")]
    return sum(tensor.numel() * tensor.element_size() for tensor in kept) + peak_bytes(steps)
