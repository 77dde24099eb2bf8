"""Type `kubeflow` of kind `cluster`: nodes that are pods of a TrainJob."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.errors import Problem
from forge_core.job import Job
from forge_plugin_kubeflow import names
from forge_plugin_launch.clusters import Cluster, Status, SubmittedRun
from forge_plugin_launch.remote.paths import has_object_store, is_below, path_problems


def _extra(_: object, __: attrs.Attribute, value: Mapping[str, Any]) -> None:
    # Kubeflow's classes need a second to be imported, which a file without this key does not have to wait for
    if value:
        from forge_plugin_kubeflow.extra import refuse_wrong

        refuse_wrong(value)


@frozen(kw_only=True)
class KubeflowCluster(Cluster):
    """Kubernetes with Kubeflow Trainer, from 2.2 on: a TrainJob, which Kueue may queue and preempt."""

    image: str = field(validator=names.an_image)
    """Image of the containers, with Forge and the distributions that the job names."""
    context: str = ""
    """Context of kubectl; empty: its current one."""
    namespace: str = field(default="", validator=names.optional_label)
    """Namespace of the run; empty: the context's."""
    runtime: str = field(default="", validator=names.optional_subdomain)
    """ClusterTrainingRuntime of the cluster, by whose policies a run is started again. Empty: a TrainingRuntime is made
    next to the TrainJob, which follows exit codes."""
    queue: str = field(default="", validator=names.optional_label)
    """LocalQueue of Kueue; empty: the run is not queued by Kueue."""
    priority: str = field(default="", validator=names.optional_subdomain)
    """WorkloadPriorityClass of Kueue; empty: as the queue has it."""
    max_restarts: int = field(default=10, validator=ge(0))
    """Failures after which the run is started again. Preemptions, and runs that saved and stopped, do not count."""
    tasks_per_node: int = field(default=0, validator=ge(0))
    """Ranks of a node; 0: one a GPU, or one where there are no GPUs."""
    gpu_resource: str = field(default="nvidia.com/gpu", validator=names.resource_name)
    """Resource that `gpus_per_node` counts: `amd.com/gpu`, `gpu.intel.com/xe`."""
    resources: Mapping[str, str | int] = field(factory=dict, validator=names.quantities)
    """Further resources of each node: `cpu = 64`, `memory = "512Gi"`, `"rdma/hca" = 8`."""
    volumes: Mapping[str, str] = field(factory=dict, validator=names.mounts)
    """Path at which each PersistentVolumeClaim is mounted on all nodes. `job.output` must be in one of them."""
    env: Mapping[str, str] = field(factory=dict, validator=names.variables)
    """Environment variables. Values that look like secrets are refused."""
    secrets: Mapping[str, str] = field(factory=dict, validator=names.secret_references)
    """Environment variables with a key of a Secret: `WANDB_API_KEY = "wandb/api-key"`."""
    service_account: str = field(default="", validator=names.optional_subdomain)
    """ServiceAccount of the pods; empty: the namespace's default."""
    node_selector: Mapping[str, str] = field(factory=dict, validator=names.node_labels)
    """Labels that nodes must have."""
    image_pull_secrets: tuple[str, ...] = field(default=(), validator=names.subdomains)
    """Secrets with which the image is pulled."""
    setup: tuple[str, ...] = ()
    """Lines of bash before the run, on each node."""
    extra: Mapping[str, Any] = field(factory=dict, validator=_extra)
    """Further keys of the TrainJob's `spec`, by Trainer's names: `extra.activeDeadlineSeconds = 86400`."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks that the launcher of each pod starts."""
        return self.tasks_per_node or super().ranks_per_node

    @property
    def storage_paths(self) -> Sequence[str]:
        """Of volumes."""
        return [*self.volumes.values()]

    def run_problems(self, job: Job) -> Iterable[Problem]:
        """Whether run folders outlive the pods, and pods have what the job reads."""
        output, mounted = job.job.output, list(self.volumes.values())
        if not is_below(output, mounted) and not has_object_store(job):
            allowed = f"must be below one of {', '.join(mounted)}" if mounted else "needs a volume: cluster.volumes"
            message = f"{output!r} would be lost with the pods, and {allowed}"
            yield Problem("job.output", message)
        # Of this machine, pods get job files and component files alone
        yield from path_problems(job, [*self.node_paths, *mounted], Path(names.JOB_FOLDER))
        if self.priority and not self.queue:
            yield Problem("cluster.priority", "is a class of Kueue, which needs cluster.queue")

    def rendered(self, run: SubmittedRun) -> str:
        """The objects as YAML, as `kubectl create -f -` takes them."""
        from forge_plugin_kubeflow.documents import as_text, documents

        return as_text(documents(self, run))

    def submit(self, run: SubmittedRun) -> Iterable[str]:
        """Make the objects in the cluster."""
        from forge_plugin_kubeflow.submission import submit

        return submit(self, run)

    def status(self, run: SubmittedRun) -> Status:
        """Of the TrainJob, its JobSet and its pods."""
        from forge_plugin_kubeflow.status import status_of

        return status_of(self, run)

    def logs(self, run: SubmittedRun, follow: bool) -> int:
        """Print what the containers of all nodes print, each line with its pod."""
        from forge_plugin_kubeflow.status import print_logs

        return print_logs(self, run, follow=follow)

    def stop(self, run: SubmittedRun) -> Iterable[str]:
        """Delete the TrainJob, by which its pods save and end. The job's files stay, so that it is known as stopped."""
        from forge_plugin_kubeflow.submission import stop

        return stop(self, run)
