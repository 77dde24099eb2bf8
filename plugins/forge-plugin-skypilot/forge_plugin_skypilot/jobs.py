"""Managed jobs by the program `sky`: launched, looked at and cancelled.

The program and not the library: SkyPilot is installed in a separate environment, and its commands print JSON.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.contracts.errors import JobError
from forge_plugin_launch.clusters import State, Status, SubmittedRun
from forge_plugin_launch.remote.programs import Program, json_in
from forge_plugin_skypilot.task import job_name, text_of

if TYPE_CHECKING:
    from forge_plugin_skypilot.cluster import SkyCluster

SKY = Program("sky", "uv tool install skypilot (or pipx), with the extras of your clouds, such as 'skypilot[aws]'")
STATES: Mapping[str, State] = {
    "PENDING": "queued",
    "SUBMITTED": "starting",
    "STARTING": "starting",
    "RUNNING": "running",
    "WINDING_DOWN": "running",
    "RECOVERING": "recovering",
    "CANCELLING": "stopped",
    "CANCELLED": "stopped",
    "SUCCEEDED": "finished",
    "FAILED": "failed",
    "FAILED_SETUP": "failed",
    "FAILED_PRECHECKS": "failed",
    "FAILED_NO_RESOURCE": "failed",
    "FAILED_CONTROLLER": "failed",
}
"""`ManagedJobStatus` of SkyPilot."""
ENDED = ("finished", "failed", "stopped")


def launch(cluster: SkyCluster, run: SubmittedRun) -> Iterator[str]:
    """Launch a run; yields lines about it.

    Raises:
        JobError: a job of its name is under way, or SkyPilot took nothing.
    """
    text = text_of(cluster, run)
    earlier = _newest(run)
    if earlier is not None and _state(earlier) not in ENDED:
        name, number = job_name(run.name), earlier.get("job_id")
        message = (
            f"managed job {number} ({name}) is {earlier.get('status')}; stop it first, or give this run another name"
        )
        raise JobError.at("job.name", message)
    # Names alone: SkyPilot reads their values from this environment
    secrets = [word for name in cluster.secrets if name in os.environ for word in ("--secret", name)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task.yaml"
        path.write_text(text)
        SKY.ask("jobs", "launch", str(path), "--yes", "--detach-run", *secrets, work=run.work)
    launched = _newest(run)
    nodes, size = cluster.nodes, cluster.world_size
    number = f"managed job {launched.get('job_id')}" if launched else "managed job"
    yield f"{run.name}: {number} ({job_name(run.name)}), {size} ranks on {nodes} nodes"
    yield "  look at it, read its output, end it: the same command with --status, --logs, --stop"


def status_of(run: SubmittedRun) -> Status:
    """Returns the status of the newest managed job of a run."""
    job = _demand(run)
    facts = {
        "recoveries": job.get("recovery_count"),
        "where": job.get("infra") or job.get("cluster_resources") or "",
        "cause": job.get("failure_reason") or job.get("details") or "",
    }
    return Status(
        state=_state(job),
        words=str(job.get("status")),
        id=str(job["job_id"]),
        facts={key: value for key, value in facts.items() if value not in (None, "", "-")},
    )


def print_logs(run: SubmittedRun, *, follow: bool) -> int:
    """Print the output of a run; returns the exit code of `sky`."""
    # Without --tail SkyPilot prints the last lines only
    number = str(_demand(run)["job_id"])
    return SKY.show("jobs", "logs", number, *(["--follow"] if follow else ["--no-follow", "--tail", "0"]))


def cancel(run: SubmittedRun) -> Iterator[str]:
    """Cancel a run, which saves within 30 s; yields lines about it."""
    job = _demand(run)
    number = str(job["job_id"])
    if _state(job) in ENDED:
        raise JobError(f"managed job {number} of {run.name} has ended: {job.get('status')}")
    # Gracefully: processes get SIGTERM, and cached files are uploaded before the nodes go
    SKY.ask("jobs", "cancel", number, "--graceful", "--yes")
    yield f"{run.name}: managed job {number} saves and ends; forge-run submit with the same job continues it"


def _demand(run: SubmittedRun) -> Mapping[str, Any]:
    if job := _newest(run):
        return job
    raise JobError(f"SkyPilot has no managed job {job_name(run.name)}: {run.name} was not submitted to it")


def _newest(run: SubmittedRun) -> Mapping[str, Any] | None:
    """The managed job of a run that was launched last."""
    jobs = json_in(SKY.ask("jobs", "queue", "--all", "--verbose", "--output", "json"), "sky jobs queue")
    # SkyPilot allows several jobs of one name, of which all but the last have ended
    named = [job for job in jobs if job.get("job_name") == job_name(run.name)]
    return max(named, key=lambda job: int(job["job_id"]), default=None)


def _state(job: Mapping[str, Any]) -> State:
    # A later SkyPilot may have others
    return STATES.get(str(job.get("status")), "unknown")
