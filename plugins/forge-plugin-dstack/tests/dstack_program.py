"""A stand-in for dstack's program, and what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge_testing.tiny import TINY_JOB

JOB = TINY_JOB.replace("global_batch_size = 4", "global_batch_size = 16") + '[job]\nname = "long"\noutput = "/runs"\n'
DSTACK = """#!/bin/bash
# Notes its command line, and the task
echo "$@" >> calls
case "$1" in
    ps) cat runs.json ;;
    run) [ -e run.json ] || { echo "Run $3 not found"; exit 1; }; cat run.json ;;
    apply) cat > applied.yaml; [ ! -e refuse ] || { echo "No fleets" >&2; exit 1; }; cp after.json runs.json ;;
    logs | attach) echo "step 10" ;;
esac
"""


def dstack_run(status: str, *exits: int | None, identity: str = "1", **more: Any) -> dict[str, Any]:
    """A run as `dstack run get --json` prints it, with the exit codes of the first node's starts."""
    starts = [{"submission_num": number, "exit_status": code} for number, code in enumerate(exits)]
    jobs = [{"job_spec": {"job_num": number}, "job_submissions": starts} for number in (0, 1)]
    about = {"id": identity, "project_name": "main", "status": status, "run_spec": {"run_name": "long"}, "jobs": jobs}
    return {**about, "termination_reason": None, "cost": 1.234, **more}


def calls() -> list[str]:
    """Command lines with which `dstack` was called."""
    return Path("calls").read_text().splitlines() if Path("calls").exists() else []
