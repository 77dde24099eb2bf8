"""The time of a step, against the bound of `forge-run plan --calibrate`."""

from __future__ import annotations

from typing import Any

from forge_core import Catalog
from forge_core.parallel.initialise import DTYPES
from forge_core.parallel.mesh import leave_group
from gpu.bench import Bench, piece
from gpu.runs import decoder, experts, load, merged, train

JOBS: dict[str, dict[str, Any]] = {
    "dense": {},
    "recomputed": {"parallel": {"activation_checkpointing": {}}},
    "fsdp of one": {"parallel": {"fsdp": {}}},
    "8 experts": {},
}
TINY = ("dense", "8 experts")
"""Those of the tiny form."""


@piece("plan", "the time of a step against the bound of forge-run plan, calibrated by the same run")
def plan(bench: Bench) -> None:
    from forge_plugin_plan.error import Error
    from forge_plugin_plan.estimate import make_plan
    from forge_plugin_plan.gpus import NETWORK_GBITS
    from forge_plugin_plan.machine import Machine
    from forge_plugin_plan.measurements import FILE, Measurements

    if not bench.on_gpu:
        bench.notes.append("On a CPU: that the program runs; launches there are no kernels.")
    names = [name for name in JOBS if not bench.tiny or name in TINY]
    jobs = {name: load(bench, _sections(bench, name)) for name in names}
    leave_group()  # a plan makes a world of its own, so all plans come before the first run
    plans = {name: make_plan(job, Catalog.installed(), 1) for name, job in jobs.items()}
    for name, job in jobs.items():
        with bench.case(name):
            train(job)
            path = bench.folder / job.job.name / FILE
            found = Measurements.read(path)
            dtype = str(DTYPES[job.train.precision]).removeprefix("torch.")
            machine = Machine.calibrated(found, None, NETWORK_GBITS * 1e9 / 8, dtype)
            error = Error.of(plans[name], machine, found, path)
            bench.check(not error.why, f"{name}: no step to compare: {error.why}")
            bench.row(
                "time of a step, ms",
                job=name,
                bound=None if error.predicted is None else error.predicted * 1e3,
                measured=None if error.measured is None else error.measured * 1e3,
                error=error.error,
                tflops=machine.flops / 1e12,
                gb_per_s=machine.bandwidth / 1e9,
                launch_us=machine.launch * 1e6,
            )


def _sections(bench: Bench, name: str) -> dict[str, Any]:
    sections = merged(decoder(bench), JOBS[name])
    sections["job"]["name"] = name.replace(" ", "-")  # runs with files of their own
    sections["train"]["steps"] = bench.size(30, 5)
    sections["hooks"] = {"calibration": {"warmup": bench.size(10, 2)}}
    if name == "8 experts":
        sections["model"]["ffn"] = experts(8, 2, bench.size(1408, 64))
    return sections
