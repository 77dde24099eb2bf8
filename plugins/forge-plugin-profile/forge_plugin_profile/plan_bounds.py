"""The bounds of `forge-run plan` beside what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_core.checkpoint.run_folder import JOB
from forge_core.contracts.errors import JobError
from forge_plugin_profile.found import run_folder
from forge_plugin_profile.report import Facts, ms, table


def bounds_table(facts: Facts, trace: Path, gpu: str) -> str:
    """Returns Markdown: each bound on the time of a step of this rank, with what was measured, and the ratio.

    Raises:
        JobError: the trace is in no run folder, or the job cannot be planned.
    """
    bounds = plan_bounds(trace, facts["world_size"] or 1, facts["rank"], gpu)
    rows = [*_rows(facts, bounds)]
    slowest = max(rows, key=lambda row: row[2] - row[1])
    words = f"Largest gap: {slowest[0]}, {ms(slowest[2])} measured, at least {ms(slowest[1])}."
    cells = [[what, ms(bound), ms(time), f"{time / bound:.1f}" if bound else "-"] for what, bound, time in rows]
    return f"## Bounds of the plan ({gpu})\n\n{words}\n\n" + table([["", "at least", "measured", "ratio"], *cells])


def plan_bounds(trace: Path, world_size: int, rank: int, gpu: str) -> Mapping[str, float]:
    """Returns seconds of a step at least, by resource, of the rank of the plan that computes the same layers.

    Raises:
        JobError: the trace is in no run folder, or the job cannot be planned; with the words of `forge-run plan`.
    """
    folder = run_folder(trace)
    if folder is None:
        raise JobError(f"--gpu needs the job: {trace} is not in a run folder, whose job.toml has it")
    # Uses the documented command and its JSON, in a separate process, as a plan needs a world of fake ranks.
    argv = [sys.executable, "-m", "forge_core", "plan", str(folder / JOB), "--json"]
    done = subprocess.run(
        [*argv, f"--world-size={world_size}", f"--gpu={gpu}"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        words = done.stderr.strip() or done.stdout.strip()
        raise JobError(f"forge-run plan failed (forge-plugin-plan must be installed for --gpu):\n{words}")
    ranks: list[dict[str, Any]] = json.loads(done.stdout)["ranks"]
    # The plan has one rank of each pipeline stage
    of_stage = world_size // len(ranks)
    own = ranks[min(rank // of_stage, len(ranks) - 1)]
    if own["seconds_at_least"] is None:
        why = own["failure"] or "its step was not simulated"
        raise JobError(f"forge-run plan has no bounds for rank {rank}: {why}")
    return own["seconds_at_least"]


def _rows(facts: Facts, bounds: Mapping[str, float]) -> Iterator[tuple[str, float, float]]:
    """(resource, seconds at least, seconds measured)."""
    busy = facts["busy_s"]
    links = {name: seconds for name, seconds in bounds.items() if name not in ("compute", "memory", "launches")}
    yield "compute", bounds["compute"], busy["compute"]
    # Kernels read and write memory while they compute, so both times count
    yield "memory", bounds["memory"], busy["compute"] + busy["copy"]
    # As a sum, since measured communication is not divided by line
    if links:
        yield f"communication ({', '.join(links)})", sum(links.values()), busy["communication"]
    yield "step, if all overlaps", max(bounds.values()), facts["step_s"]
