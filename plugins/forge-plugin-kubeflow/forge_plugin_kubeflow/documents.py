"""What Kubernetes gets of a run: ConfigMap, TrainingRuntime and TrainJob, each checked by Kubeflow's own classes."""

from __future__ import annotations

import hashlib
import math
import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kubeflow_trainer_api import models
from pydantic import BaseModel, ValidationError

from forge_core.contracts.errors import ExitCode, JobError
from forge_plugin_kubeflow.job_files import JobFiles, job_files
from forge_plugin_kubeflow.names import JOB_FOLDER, SHARED_MEMORY, object_name
from forge_plugin_launch.clusters import CONTINUED, FINAL, SubmittedRun
from forge_plugin_launch.remote.yaml_text import as_yaml

if TYPE_CHECKING:
    from forge_plugin_kubeflow.cluster import KubeflowCluster

Document = dict[str, Any]

API = "trainer.kubeflow.org/v1alpha1"
GROUP = "trainer.kubeflow.org"
MANAGER = "forge-run.dev/submit"
"""Owner of our patch of the runtime; Kueue adds another patch."""
MANAGED = {"app.kubernetes.io/managed-by": "forge-run"}
"""Label of all objects of ours: no other object is replaced or deleted."""
RUN_FOLDER = "forge-run.dev/run-folder"
"""Annotation by which runs of one name differ."""
NODE = "node"
"""Replicated job, and container in it, of Trainer's runtimes."""
NO_LIMIT_S = 86_400
"""Grace of a run that sets no limit: Kubernetes has no pods without one."""
MARGIN_S = 30
"""Seconds beyond `launch.grace_s`, in which the launcher ends ranks that did not save, and reports them."""


def documents(cluster: KubeflowCluster, run: SubmittedRun) -> list[Document]:
    """Returns the objects of a run, in the order in which they are to be made.

    Raises:
        JobError: files of the job cannot be sent, or Kubeflow's classes refuse an object.
    """
    name = object_name(run.name, cluster.nodes)
    files = job_files(run, list(cluster.volumes.values()))
    # The pods need the files, and the TrainJob the runtime
    made = [_config_map(files)]
    if not cluster.runtime:
        made.append(_training_runtime(cluster))
    made.append(_train_job(name, cluster, run, files))
    for document in made:
        document["metadata"] = {
            "name": name,
            **({"namespace": cluster.namespace} if cluster.namespace else {}),
            "labels": {**MANAGED, **document.get("metadata", {}).get("labels", {})},
            "annotations": {RUN_FOLDER: str(run.folder)},
        }
        check(document)
    return made


def as_text(made: list[Document]) -> str:
    """Returns documents as YAML, as `kubectl create -f -` takes them."""
    return "".join(f"---\n{as_yaml(document)}" for document in made)


def check(document: Document) -> None:
    """Compare a document with the class of its kind; a `JobError` names what it has no field for, or another type."""
    if problem := problem_of(document, CLASSES[document["kind"]]):
        raise JobError(f"{document['kind']} {document['metadata']['name']}: {problem}")


def problem_of(document: Mapping[str, Any], cls: type[BaseModel]) -> str:
    """Returns why a document is none of a class, by the class itself; empty: it is one."""
    try:
        made = cls.from_dict(dict(document)).to_dict()  # type: ignore[attr-defined]  # of generated classes
    except ValidationError as error:
        first = error.errors()[0]
        # Nested objects are made one by one, so that the class shows where the key is
        where = error.title.removeprefix("TrainerV1alpha1").removeprefix("IoK8sApi")
        return f"{'.'.join(map(str, first['loc']))} of {where}: {first['msg']}, got {first['input']!r}"
    except (ValueError, TypeError, AttributeError) as error:
        return str(error)
    # The classes leave out what they do not know, where the API server would refuse it or leave it out, too
    unknown = next(_left_out(document, made, ""), "")
    return f"{unknown}: no such field" if unknown else ""


def _left_out(given: Any, made: Any, path: str) -> Iterator[str]:
    if isinstance(given, Mapping):
        for key, value in given.items():
            below = f"{path}.{key}" if path else key
            if not isinstance(made, Mapping) or key not in made:
                yield below
            else:
                yield from _left_out(value, made[key], below)
    elif isinstance(given, list) and isinstance(made, list):
        for number, (one, other) in enumerate(zip(given, made, strict=False)):
            yield from _left_out(one, other, f"{path}[{number}]")


CLASSES: Mapping[str, type[BaseModel]] = {
    "ConfigMap": models.IoK8sApiCoreV1ConfigMap,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}


# --- the job's files ------------------------------------------------------------------------------------------------


def _config_map(files: JobFiles) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {},
        "data": {_key(path): text for path, text in files.texts.items()},
    }


def _key(path: str) -> str:
    """Key of a file: its own name where a ConfigMap allows it, for whoever reads the object."""
    plain = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_.") else "-" for letter in path)
    return plain if plain == path else f"{plain[:200]}-{hashlib.sha256(path.encode()).hexdigest()[:6]}"


# --- what happens after an end --------------------------------------------------------------------------------------


def _training_runtime(cluster: KubeflowCluster) -> Document:
    """Returns the runtime that starts a run again by its exit code.

    A patch of a TrainJob reaches volumes and variables, and neither policy below, so that they need a runtime.
    """
    policy = {
        "rules": [
            # First: a pod that is evicted may still find that its job is wrong, or its losses are not finite
            _on_exit_codes("FailJob", [code for code in FINAL if code != ExitCode.FINISHED]),
            # Neither counts as a failure. The whole run saves, and each of its pods is replaced when it has ended.
            _on_exit_codes("Ignore", list(CONTINUED)),
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
    }
    pod = {"restartPolicy": "Never", "containers": [{"name": NODE, "image": cluster.image}]}
    job = {
        "name": NODE,
        "replicas": 1,
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            # 0: the first other failure fails the Job, so that JobSet starts all nodes at once. A single pod that was
            # started again would meet ranks that still wait for the one that failed.
            "spec": {"backoffLimit": 0, "podFailurePolicy": policy, "template": {"spec": pod}},
        },
    }
    final = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    jobs = {"failurePolicy": {"maxRestarts": cluster.max_restarts, "rules": [final]}, "replicatedJobs": [job]}
    return {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": {"labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {"mlPolicy": {"numNodes": cluster.nodes, "torch": {}}, "template": {"spec": jobs}},
    }


def _on_exit_codes(action: str, codes: list[int]) -> Document:
    values = sorted(int(code) for code in codes)
    return {"action": action, "onExitCodes": {"containerName": NODE, "operator": "In", "values": values}}


# --- the run --------------------------------------------------------------------------------------------------------


def _train_job(name: str, cluster: KubeflowCluster, run: SubmittedRun, files: JobFiles) -> Document:
    # The runtime of ours is one of the namespace, for which no rights over the whole cluster are needed
    own = {"apiGroup": GROUP, "kind": "TrainingRuntime", "name": name}
    shared = {"apiGroup": GROUP, "kind": "ClusterTrainingRuntime", "name": cluster.runtime}
    queue = {"kueue.x-k8s.io/queue-name": cluster.queue, "kueue.x-k8s.io/priority-class": cluster.priority}
    spec = {
        "runtimeRef": shared if cluster.runtime else own,
        "trainer": trainer(cluster, SubmittedRun(name=run.name, folder=run.folder, words=files.words, job=run.job)),
        "runtimePatches": [
            {
                "manager": MANAGER,
                "trainingRuntimeSpec": {
                    "template": {
                        "spec": {
                            "replicatedJobs": [
                                {
                                    "name": NODE,
                                    "template": {"spec": {"template": {"spec": _pod_patch(name, cluster, run, files)}}},
                                }
                            ]
                        }
                    }
                },
            }
        ],
    }
    return {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": {"labels": {key: value for key, value in queue.items() if value}},
        "spec": merged(spec, cluster.extra),
    }


def trainer(cluster: KubeflowCluster, run: SubmittedRun) -> Document:
    """Returns what each node runs."""
    variables: list[Document] = [{"name": name, "value": value} for name, value in cluster.env.items()]
    # Kubernetes itself puts the value into the container
    for name, reference in cluster.secrets.items():
        secret, _, key = reference.partition("/")
        variables.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    asked: dict[str, str] = {resource: str(quantity) for resource, quantity in cluster.resources.items()}
    if cluster.gpus_per_node:
        asked[cluster.gpu_resource] = str(cluster.gpus_per_node)
    return {
        "image": cluster.image,
        "command": ["bash", "-c", _for_kubernetes(node_script(cluster, run))],
        **({"env": variables} if variables else {}),
        "numNodes": cluster.nodes,
        "numProcPerNode": cluster.ranks_per_node,
        # Both the same: pods with less than they ask for are the first to be evicted
        **({"resourcesPerNode": {"limits": asked, "requests": dict(asked)}} if asked else {}),
    }


def node_script(cluster: KubeflowCluster, run: SubmittedRun) -> str:
    """Returns the bash script of each node, which finds its number and the first node in Trainer's variables."""
    # `exec`: SIGTERM must reach the launcher, and bash as the first process of a container would keep it to itself
    command = f"exec {cluster.node_command(run, '$PET_NODE_RANK', '$PET_MASTER_ADDR')}"
    return "\n".join(["set -e", f"cd {shlex.quote(JOB_FOLDER)}", *cluster.setup, command, ""])


def _for_kubernetes(text: str) -> str:
    """A word of a command as a pod has it: `$(NAME)` is Kubernetes' own, and `$$` is how it writes a `$`."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def _pod_patch(name: str, cluster: KubeflowCluster, run: SubmittedRun, files: JobFiles) -> Document:
    # Keys have no slashes, and paths may
    items = [{"key": _key(path), "path": path} for path in files.texts]
    volumes: list[Document] = [
        {"name": "forge-run-job", "configMap": {"name": name, "items": items}},
        # Containers have 64 MiB otherwise, which workers of data loaders and NCCL exceed
        {"name": "forge-run-shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [
        {"name": "forge-run-job", "mountPath": JOB_FOLDER, "readOnly": True},
        {"name": "forge-run-shm", "mountPath": SHARED_MEMORY},
    ]
    # Numbers, since names of claims may have characters and lengths that names of volumes may not
    for number, (claim, path) in enumerate(cluster.volumes.items()):
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"volume-{number}", "mountPath": path})
    patch: Document = {
        "containers": [{"name": NODE, "volumeMounts": mounts}],
        "volumes": volumes,
        "terminationGracePeriodSeconds": grace_s(run),
    }
    if cluster.service_account:
        patch["serviceAccountName"] = cluster.service_account
    if cluster.node_selector:
        patch["nodeSelector"] = dict(cluster.node_selector)
    if cluster.image_pull_secrets:
        patch["imagePullSecrets"] = [{"name": secret} for secret in cluster.image_pull_secrets]
    return patch


def grace_s(run: SubmittedRun) -> int:
    """Seconds between SIGTERM and SIGKILL of a pod."""
    return math.ceil(run.grace_s) + MARGIN_S if run.grace_s else NO_LIMIT_S


def merged(spec: Mapping[str, Any], extra: Mapping[str, Any], path: str = "extra") -> Document:
    """Returns a spec with further keys; lists are appended.

    Raises:
        JobError: a key is set by both.
    """
    result = dict(spec)
    for key, value in extra.items():
        present = result.get(key)
        if present is None:
            result[key] = value
        elif isinstance(present, Mapping) and isinstance(value, Mapping):
            result[key] = merged(present, value, f"{path}.{key}")
        elif isinstance(present, list) and isinstance(value, list):
            result[key] = [*present, *value]
        else:
            raise JobError(f"{path}.{key}: forge-run submit sets it itself, from the other keys of the cluster")
    return result
