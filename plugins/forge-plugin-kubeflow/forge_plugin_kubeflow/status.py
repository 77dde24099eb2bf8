"""State of a run on a cluster, and what the run prints."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_plugin_kubeflow import kubectl
from forge_plugin_kubeflow.documents import NODE
from forge_plugin_kubeflow.kubectl import KubectlError
from forge_plugin_kubeflow.names import object_name
from forge_plugin_launch.clusters import State, Status, SubmittedRun

if TYPE_CHECKING:
    from forge_plugin_kubeflow.cluster import KubeflowCluster

ENDS: tuple[State, ...] = ("finished", "failed", "stopped")
"""States after which nothing of a run is left that trains."""
SELECTOR = "jobset.sigs.k8s.io/jobset-name"
"""Label of the pods of a JobSet, which has the name of its TrainJob."""
CONDITIONS: Sequence[tuple[str, State]] = (("Complete", "finished"), ("Failed", "failed"), ("Suspended", "queued"))
"""Conditions of a TrainJob, each with the state that it means, the final ones first."""


@frozen(kw_only=True)
class Seen:
    """The objects of a run that a cluster has."""

    name: str
    objects: Sequence[Mapping[str, Any]]
    """TrainJob and ConfigMap; either may be missing."""
    job_set: Mapping[str, Any]
    """Empty: it is not there, or may not be read."""
    pods: Sequence[Mapping[str, Any]]

    @property
    def train_job(self) -> Mapping[str, Any] | None:
        """The TrainJob; None: it is not there."""
        return next((each for each in self.objects if each["kind"] == "TrainJob"), None)

    @property
    def restarts(self) -> int:
        """Times that JobSet has started all nodes again."""
        return int(self.job_set.get("status", {}).get("restarts", 0))

    def status(self) -> Status:
        """Returns the state of the run. `facts`: `restarts`, and the `pods` with node, phase and exit code."""
        state, words = self._state()
        facts = {"restarts": self.restarts, "pods": [_pod(pod) for pod in self.pods]}
        return Status(state=state, words=words, id=self.name, facts=facts)

    def _state(self) -> tuple[State, str]:
        alive = [pod for pod in self.pods if pod.get("status", {}).get("phase") in ("Pending", "Running", "Unknown")]
        if self.train_job is None:
            if alive:
                return "running", f"deleted; {len(alive)} pods save and end"
            return "stopped", "deleted; submit the same job to continue it"
        status = self.train_job.get("status", {})
        # A condition that no longer holds stays in the list, as False
        conditions = {each["type"]: each for each in status.get("conditions", []) if each["status"] == "True"}
        for name, state in CONDITIONS:
            if name in conditions:
                return state, _words(conditions[name])
        node: Mapping[str, Any] = next((each for each in status.get("jobsStatus", []) if each["name"] == NODE), {})
        if node.get("ready"):
            return "running", "all pods are ready"
        # JobSet has deleted the pods of the last attempt, or is about to
        again: State = "recovering" if self.restarts or node.get("failed") else "starting"
        return again, f"{len(alive)} pods, not all of them ready"


def _words(condition: Mapping[str, Any]) -> str:
    parts = [condition.get("reason", ""), condition.get("message", "")]
    return ": ".join(part for part in parts if part) or condition["type"]


def _pod(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """Facts of a pod. `exit_code` is None until its container has ended."""
    # A pod that is evicted before it starts has no containers yet
    containers = pod.get("status", {}).get("containerStatuses", [])
    ends = [each["state"]["terminated"] for each in containers if "terminated" in each.get("state", {})]
    return {
        "pod": pod["metadata"]["name"],
        "node": pod.get("spec", {}).get("nodeName", ""),
        "phase": pod.get("status", {}).get("phase", "Unknown"),
        "exit_code": ends[0]["exitCode"] if ends else None,
    }


def look(cluster: KubeflowCluster, name: str) -> Seen:
    """Returns what a cluster has of a run; a `KubectlError` if it does not answer."""
    # The JobSet has the name of its TrainJob, and counts what the TrainJob does not
    return Seen(
        name=name,
        objects=kubectl.objects(cluster, f"trainjob/{name}", f"configmap/{name}"),
        job_set=next(_readable(cluster, f"jobset/{name}"), {}),
        pods=list(_readable(cluster, "pods", f"--selector={SELECTOR}={name}")),
    )


def _readable(cluster: KubeflowCluster, *words: str) -> Iterator[Mapping[str, Any]]:
    """Objects that make the status fuller, and that a user may have no right to read."""
    try:
        yield from kubectl.objects(cluster, *words)
    except KubectlError:
        return


def status_of(cluster: KubeflowCluster, run: SubmittedRun) -> Status:
    """Returns the status of a run.

    Raises:
        JobError: the cluster does not know it, or does not answer.
    """
    name = object_name(run.name, cluster.nodes)
    try:
        seen = look(cluster, name)
    except KubectlError as error:
        raise JobError(f"{run.name}: its status is not known: {error}") from error
    if not seen.objects:
        raise JobError(f"{run.name} was not submitted: the cluster has no TrainJob {name}")
    return seen.status()


def print_logs(cluster: KubeflowCluster, run: SubmittedRun, *, follow: bool) -> int:
    """Print the output of a run's pods; returns kubectl's exit code, which has printed its own error."""
    name = object_name(run.name, cluster.nodes)
    words = ["logs", f"--selector={SELECTOR}={name}", f"--container={NODE}", "--prefix", "--tail=-1"]
    # kubectl refuses to follow more than five otherwise
    words += [f"--max-log-requests={cluster.nodes}", *(["--follow"] if follow else [])]
    return subprocess.run(kubectl.command(cluster, *words), check=False).returncode
