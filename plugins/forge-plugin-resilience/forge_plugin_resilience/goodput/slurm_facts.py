"""Facts from SLURM about the job that this process is part of."""

from __future__ import annotations

import os
import subprocess
from datetime import datetime
from typing import Any

ANSWER_S = 10.0
"""Seconds that scontrol has to answer."""


def slurm_facts() -> dict[str, Any]:
    """Returns job id, restart count, and the seconds in the queue before this start; empty outside SLURM."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return {}
    facts: dict[str, Any] = {"job": f"SLURM {job}", "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0)}
    queued = queued_seconds(job)
    return facts if queued is None else {**facts, "queued_s": queued}


def queued_seconds(job: str) -> float | None:
    """Returns how long a job waited before it began, since it was last queued; None if SLURM does not say."""
    command = ["scontrol", "show", "job", "--oneliner", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True)
        fields = dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)
        submitted, began = (datetime.fromisoformat(fields[name]) for name in ("SubmitTime", "StartTime"))
    except (OSError, subprocess.SubprocessError, KeyError, ValueError):
        return None
    return max(0.0, (began - submitted).total_seconds())
