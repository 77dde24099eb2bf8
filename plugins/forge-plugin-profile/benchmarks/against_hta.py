"""Compares idle time and overlap with Holistic Trace Analysis, on a synthetic trace of a GPU.

pip install --no-deps HolisticTraceAnalysis plotly networkx narwhals packaging
PYTHONPATH=plugins/forge-plugin-profile/tests python plugins/forge-plugin-profile/benchmarks/against_hta.py

A program and no test, as HTA requires jupyterlab. It leaves out the last step of a trace; so does the comparison.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found]
from profile_traces import STEP, gpu_trace

from forge_plugin_profile.breakdown import breakdown
from forge_plugin_profile.trace import trace_of


def first_step() -> dict[str, Any]:
    """Returns the trace with its first step only."""
    content = gpu_trace()
    return {**content, "traceEvents": [event for event in content["traceEvents"] if event["ts"] < STEP]}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rank-3.pt.trace.json").write_text(json.dumps(gpu_trace()))
        hta = TraceAnalysis(trace_dir=folder)
        theirs = hta.get_temporal_breakdown(visualize=False).iloc[0]
        overlap = float(hta.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"])
    content = first_step()
    ours = breakdown(trace_of({**content, "forge": {**content["forge"], "recorded_steps": 1}}))
    hidden = 1 - ours["exposed_s"] / ours["busy_s"]["communication"]
    rows = [
        ("rank", ours["rank"], int(theirs["rank"])),
        ("idle, µs", ours["idle"] * ours["step_s"] * 1e6, float(theirs["idle_time(us)"])),
        ("computes, µs", ours["busy_s"]["compute"] * 1e6, float(theirs["compute_time(us)"])),
        ("not hidden, µs", ours["exposed_s"] * 1e6, float(theirs["non_compute_time(us)"])),
        ("hidden, %", 100 * hidden, overlap),
    ]
    for name, own, other in rows:
        print(f"{name:<16}{own:>10.2f}{other:>10.2f}")
        assert abs(own - other) < 0.01, name


if __name__ == "__main__":
    main()
