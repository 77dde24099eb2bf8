"""The task of a run: what SkyPilot is given, checked by its own schema."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.contracts.errors import JobError, Problem
from forge_core.contracts.run_end import ATTEMPT
from forge_core.job import Job
from forge_plugin_launch.clusters import SubmittedRun
from forge_plugin_launch.remote.paths import (
    demand_sendable,
    folder_line,
    has_object_store,
    is_below,
    name_of,
    path_problems,
)
from forge_plugin_launch.remote.yaml_text import as_yaml, merged, plain
from forge_plugin_skypilot.keys import accelerators_of
from forge_plugin_skypilot.schema import VERSION, problem_of

if TYPE_CHECKING:
    from forge_plugin_skypilot.cluster import SkyCluster

NODE = "$SKYPILOT_NODE_RANK"
FIRST_HOST = '$(echo "$SKYPILOT_NODE_IPS" | head -n1)'
"""One address of a node a line, in the order of their numbers."""
SUBMISSION = "$SKYPILOT_TASK_ID"
"""The same for all starts of a managed job."""
ALLOWED = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-"


def job_name(name: str) -> str:
    """Name of the managed job of a run."""
    return name_of(name, ALLOWED, 60, "run-")


def text_of(cluster: SkyCluster, run: SubmittedRun) -> str:
    """Returns the task of a run as YAML.

    Raises:
        JobError: the nodes would not have a file of the run, something looks like a secret, or SkyPilot's schema
            refuses the task.
    """
    demand_sendable(run, Path(cluster.copied(run)))
    document = plain(_task(cluster, run))
    if problem := problem_of(document):
        raise JobError(f"the task is none of SkyPilot {VERSION}: {problem}")
    return as_yaml(document)


def _task(cluster: SkyCluster, run: SubmittedRun) -> dict[str, Any]:
    document = {
        "name": job_name(run.name),
        "num_nodes": cluster.nodes,
        "workdir": cluster.workdir,
        "resources": _resources(cluster),
        "envs": dict(cluster.envs),
        # Without values: those are in SkyPilot's store, or in the environment of `sky`
        "secrets": dict.fromkeys(cluster.secrets),
        "file_mounts": dict(cluster.file_mounts),
        "volumes": dict(cluster.volumes),
        "setup": _lines(*cluster.setup),
        "run": _lines(*_script(cluster, run)),
    }
    return merged({key: value for key, value in document.items() if value}, cluster.extra)


def _lines(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines if line)


def _resources(cluster: SkyCluster) -> dict[str, Any]:
    # With their number: the file may have it in `gpus_per_node`, and SkyPilot's default is 1
    named = accelerators_of(cluster.accelerators)
    asked = [f"{name}:{count or cluster.ranks_per_node}" for name, count in named]
    resources: dict[str, Any] = {
        "infra": cluster.infra,
        "accelerators": asked[0] if len(asked) == 1 else asked,
        "use_spot": cluster.use_spot,
        "image_id": cluster.image_id,
        "job_recovery": cluster.recovery,
    }
    return {key: value for key, value in resources.items() if value}


def _script(cluster: SkyCluster, run: SubmittedRun) -> Iterator[str]:
    """Yields the lines that bash runs on each node."""
    if line := folder_line(run.work, Path(cluster.copied(run))):
        yield f"{line} || exit 1"
    yield f'export {ATTEMPT}="{SUBMISSION}"'
    # SkyPilot counts restarts, whatever the exit code: losses that are not finite would be trained again
    starts = f'python3 -m forge_plugin_launch.remote.starts {shlex.quote(_folder(run))} --attempt "${ATTEMPT}"'
    yield f'[ "{NODE}" != 0 ] || {starts} || exit 1'
    # `exec`: signals reach the program that saves, and no shell around it
    yield f"exec {cluster.node_command(run, NODE, FIRST_HOST)}"


def _folder(run: SubmittedRun) -> str:
    """The run folder as the nodes have it: relative paths start in their working directory."""
    assert run.job is not None, "of a run that is submitted"
    return os.path.join(run.job.job.output, run.job.job.name)


def run_problems(cluster: SkyCluster, job: Job) -> Iterator[Problem]:
    """Yields why checkpoints would not outlive the nodes, and which paths the nodes do not have."""
    yield from _output_problems(cluster, job)
    if cluster.use_spot and not job.checkpoint.interval and not job.checkpoint.interval_minutes:
        # No warning reaches a run: SkyPilot finds out when the instance has gone
        message = "spot instances go without notice, and this job saves only at its end; set interval_minutes"
        yield Problem("checkpoint.interval", message)
    # Copies as well: the job may read them
    yield from path_problems(job, [*cluster.node_paths, *cluster.storage_paths], Path.cwd() / cluster.workdir)


def _output_problems(cluster: SkyCluster, job: Job) -> Iterator[Problem]:
    output = job.job.output
    mount = is_below(output, cluster.stored)
    if not mount:
        allowed = (
            f"must be below {' or '.join(cluster.stored)}"
            if cluster.stored
            else "needs cluster.volumes, or a bucket in cluster.file_mounts"
        )
        copy = is_below(output, cluster.file_mounts)
        why = f"{copy} is a copy, and new files in it stay on the node" if copy else "would be lost with the nodes"
        yield Problem("job.output", f"{output!r}: {why}; it {allowed}")
    elif cluster.stored[mount] == "MOUNT":
        message = f'{mount} is a bucket that no file can be appended to, and a run appends; write mode = "MOUNT_CACHED"'
        yield Problem("job.output", message)
    elif cluster.stored[mount] == "MOUNT_CACHED" and cluster.nodes > 1 and not has_object_store(job):
        message = (
            f"{mount} is a bucket with a cache on each of {cluster.nodes} nodes, which see each other's files too late "
            'to save together; write [checkpoint.storage] type = "objects" with its URL, or take a volume'
        )
        yield Problem("checkpoint.storage", message)
