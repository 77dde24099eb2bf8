"""dstack's runs by its program: applied, looked at and stopped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from forge_core.contracts.errors import ExitCode, JobError
from forge_plugin_dstack.task import run_name, text_of
from forge_plugin_launch.clusters import CONTINUED, FINAL, State, Status, SubmittedRun
from forge_plugin_launch.remote.programs import Program, json_in

if TYPE_CHECKING:
    from forge_plugin_dstack.cluster import DstackCluster

DSTACK = Program("dstack", "pip install dstack, and `dstack login` or `dstack project add`")
WAITING: Mapping[str, State] = {"pending": "queued", "submitted": "queued", "provisioning": "starting"}
BY_REQUEST = ("stopped_by_user", "aborted_by_user")
ENDED = ("done", "failed", "terminated")


def apply(cluster: DstackCluster, run: SubmittedRun) -> Iterator[str]:
    """Submit a run; yields lines about it.

    Raises:
        JobError: a run of its name is under way, or dstack took nothing.
    """
    text, name = text_of(cluster, run), run_name(run.name)
    earlier = _found(name)
    if earlier is not None and earlier["status"] not in ENDED:
        # `apply --yes` would stop that one
        raise JobError.at(
            "job.name", f"run {name} is {earlier['status']}; stop it first, or give this run another name"
        )
    # Values of variables that `env` has by name alone are read by dstack, from this environment
    DSTACK.ask("apply", "--file", "-", "--yes", "--detach", text=text, work=run.work)
    made = _found(name)
    if made is None or (earlier is not None and made["id"] == earlier["id"]):
        raise JobError(f"dstack apply ended well, and there is no new run {name}: dstack ps")
    nodes, size = cluster.nodes, cluster.world_size
    yield f"{run.name}: run {name} of project {made['project_name']}, {size} ranks on {nodes} nodes"
    yield "  look at it, read its output, end it: the same command with --status, --logs, --stop"


def status_of(run: SubmittedRun) -> Status:
    """Returns the status of dstack's run."""
    made = _demand(run)
    attempts = _attempts(made)
    last = attempts[-1] if attempts else {}
    instance = (last.get("job_provisioning_data") or {}).get("instance_type", {}).get("name", "")
    facts = {
        "attempts": len(attempts),
        "cost": round(float(made.get("cost") or 0.0), 2),
        "where": instance,
        "cause": made.get("error") or last.get("termination_reason_message") or "",
    }
    return Status(
        state=state_of(made),
        words=" ".join(filter(None, [made["status"], made.get("termination_reason")])),
        id=made["run_spec"]["run_name"],
        facts={key: value for key, value in facts.items() if value != ""},
    )


def state_of(made: Mapping[str, Any]) -> State:
    """What has become of dstack's run, as its JSON has it."""
    status, attempts = made["status"], _attempts(made)
    # A run that is submitted again has the status of a new one; its earlier starts tell them apart
    if status in WAITING:
        return "recovering" if len(attempts) > 1 else WAITING[status]
    if status in ("terminated", "terminating") and made.get("termination_reason") in BY_REQUEST:
        return "stopped"
    if status == "done":
        return _done(attempts)
    return "running" if status in ("running", "terminating") else "failed" if status in ENDED else "unknown"


def _done(attempts: list[Mapping[str, Any]]) -> State:
    """A run that is not started again ends as one that has finished; the exit code before may tell them apart."""
    code = attempts[-2].get("exit_status") if len(attempts) > 1 else None
    if code is None or code in CONTINUED:
        return "finished"
    is_final = code in FINAL and code != ExitCode.FINISHED
    # After other codes it may have been continued to its end, or given up
    return "failed" if is_final else "finished" if code == ExitCode.FINISHED else "unknown"


def print_logs(run: SubmittedRun, *, follow: bool) -> int:
    """Print the output of a run; returns the exit code of `dstack`."""
    name = run_name(run.name)
    return DSTACK.show("attach", name, "--logs") if follow else DSTACK.show("logs", name)


def stop(run: SubmittedRun) -> Iterator[str]:
    """Stop a run, which saves within 10 s; yields lines about it."""
    made = _demand(run)
    name = run_name(run.name)
    if made["status"] in ENDED:
        raise JobError(f"run {name} has ended: {made['status']}")
    DSTACK.ask("stop", name, "--yes")
    yield f"{run.name}: run {name} saves and ends; forge-run submit with the same job continues it"


def _attempts(made: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The starts of the first node, in their order."""
    first = next((job for job in made.get("jobs", []) if job["job_spec"]["job_num"] == 0), None)
    return sorted(first["job_submissions"], key=lambda each: int(each["submission_num"])) if first else []


def _demand(run: SubmittedRun) -> Mapping[str, Any]:
    """Dstack's run; its own words say that there is none."""
    return json_in(DSTACK.ask("run", "get", run_name(run.name), "--json"), "dstack run get")


def _found(name: str) -> Mapping[str, Any] | None:
    """Dstack's run of this name; None if there is none."""
    runs = json_in(DSTACK.ask("ps", "--all", "--json"), "dstack ps")["runs"]
    return next((made for made in runs if made["run_spec"]["run_name"] == name), None)
