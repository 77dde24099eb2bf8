"""A stand-in for SkyPilot's program, and what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge_testing.tiny import TINY_JOB

JOB = TINY_JOB.replace("global_batch_size = 4", "global_batch_size = 16") + '[job]\nname = "long"\noutput = "/runs"\n'
SKY = """#!/bin/bash
# Notes its command line, the task, and the names of variables that it could read
echo "$@" >> calls
case "$2" in
    queue) echo "I 11-30 09:00:00 API server started."; cat queue.json ;;
    launch) [ ! -e refuse ] || { echo "No cloud access" >&2; exit 1; }
        cp "$3" launched.yaml; cp after.json queue.json ;;
    logs) echo "step 10" ;;
esac
"""


def managed_job(number: int, status: str, name: str = "long", **more: Any) -> dict[str, Any]:
    """A managed job as `sky jobs queue --output json` prints it."""
    return {"job_id": number, "job_name": name, "status": status, "recovery_count": 0, "failure_reason": None, **more}


def calls() -> list[str]:
    """Command lines with which `sky` was called."""
    return Path("calls").read_text().splitlines() if Path("calls").exists() else []
