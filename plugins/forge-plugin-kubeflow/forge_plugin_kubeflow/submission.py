"""Makes and deletes the objects of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from forge_core.contracts.errors import JobError
from forge_plugin_kubeflow import kubectl
from forge_plugin_kubeflow.documents import MANAGED, NODE, RUN_FOLDER, as_text, documents
from forge_plugin_kubeflow.kubectl import KubectlError
from forge_plugin_kubeflow.names import object_name
from forge_plugin_kubeflow.status import ENDS, Seen, look
from forge_plugin_launch.clusters import SubmittedRun

if TYPE_CHECKING:
    from forge_plugin_kubeflow.cluster import KubeflowCluster

KINDS = "trainjob,trainingruntime,configmap"


def submit(cluster: KubeflowCluster, run: SubmittedRun) -> list[str]:
    """Make the objects of a run, and delete objects of an earlier one of the same run folder, which has ended.

    Raises:
        JobError: the run is on the cluster already, an object of its name is another's, or the cluster takes nothing.
    """
    made = documents(cluster, run)
    name = object_name(run.name, cluster.nodes)
    try:
        seen = look(cluster, name)
        _refuse_others(seen, run)
        lines = [*_runtime_lines(cluster)]
        # Only now: until here nothing has been changed
        if seen.objects:
            kubectl.ask(cluster, "delete", KINDS, name, "--ignore-not-found")
        _create(cluster, as_text(made))
    except KubectlError as error:
        raise JobError(f"Kubernetes took nothing: {error}") from error
    return [*_announcement(cluster, run, name), *lines]


def stop(cluster: KubeflowCluster, run: SubmittedRun) -> list[str]:
    """Delete the TrainJob of a run; returns lines about it.

    Raises:
        JobError: there is none, or the cluster does not delete it.
    """
    name = object_name(run.name, cluster.nodes)
    try:
        seen = look(cluster, name)
        if seen.train_job is None:
            raise JobError(f"{run.name}: the cluster has no TrainJob {name} to stop")
        _refuse_foreign(seen.train_job)
        # In the background: with --cascade=foreground the TrainJob would stay while its JobSet goes, and Trainer makes
        # the JobSet of a TrainJob again
        kubectl.ask(cluster, "delete", "trainjob", name, "--wait=false")
    except KubectlError as error:
        raise JobError(f"{run.name} was not stopped: {error}") from error
    return [f"{run.name}: TrainJob {name} is deleted; its pods save and end; submit the same job to continue it"]


def _create(cluster: KubeflowCluster, text: str) -> None:
    try:
        kubectl.ask(cluster, "create", "--filename=-", text=text)
    except BaseException:
        # kubectl makes the next objects after one that is refused, and a runtime without its job would stay
        kubectl.ask(cluster, "delete", "--filename=-", "--ignore-not-found", "--wait=false", text=text)
        raise


def _refuse_others(seen: Seen, run: SubmittedRun) -> None:
    for each in seen.objects:
        _refuse_foreign(each)
        folder = each["metadata"].get("annotations", {}).get(RUN_FOLDER, "")
        if folder != str(run.folder):
            raise JobError.at(
                "job.name", f"the cluster has {_named(each)} of another run, in {folder}; take another name"
            )
    status = seen.status()
    if seen.objects and status.state not in ENDS:
        raise JobError.at(
            "job.name", f"{run.name} is on the cluster already: {status.state}, {status.words}; stop it first, or wait"
        )


def _refuse_foreign(each: Mapping[str, Any]) -> None:
    labels = each["metadata"].get("labels", {})
    if not MANAGED.items() <= labels.items():
        raise JobError.at(
            "job.name", f"the cluster has {_named(each)}, which forge-run submit did not make; take another name"
        )


def _named(each: Mapping[str, Any]) -> str:
    return f"{each['kind']} {each['metadata']['name']}"


def _runtime_lines(cluster: KubeflowCluster) -> Iterator[str]:
    """Check the runtime that the cluster file names; yields a line where it starts nothing again."""
    if not cluster.runtime:
        return
    found = kubectl.objects(cluster, "clustertrainingruntime", cluster.runtime)
    if not found:
        raise JobError.at("cluster.runtime", f"the cluster has no ClusterTrainingRuntime {cluster.runtime!r}")
    # Trainer patches the job of this name, and passes its variables to the container of this name, in no other runtime
    template = found[0]["spec"].get("template", {}).get("spec", {})
    jobs = {job["name"]: job for job in template.get("replicatedJobs", [])}
    if NODE not in jobs or "torch" not in found[0]["spec"].get("mlPolicy", {}):
        raise JobError.at("cluster.runtime", f"{cluster.runtime!r} has no replicated job {NODE!r} under mlPolicy.torch")
    if "failurePolicy" not in template or "podFailurePolicy" not in jobs[NODE]["template"].get("spec", {}):
        yield f"  {cluster.runtime} does not follow exit codes: it has no failurePolicy with a podFailurePolicy"


def _announcement(cluster: KubeflowCluster, run: SubmittedRun, name: str) -> Iterator[str]:
    size, nodes = cluster.world_size, cluster.nodes
    ranks = f"{size} rank{'s' if size > 1 else ''} on {nodes} node{'s' if nodes > 1 else ''}"
    place = f" in {cluster.namespace}" if cluster.namespace else ""
    yield f"{run.name}: TrainJob {name}{place}, {ranks}"
    yield "  look at it, read its output, end it: the same command with --status, --logs, --stop"
